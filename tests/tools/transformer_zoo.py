"""Tiny transformers from the transformers library, with random weights and padded inputs.

Each entry makes a model in float64 without dropout, and a batch of inputs by name. A record's loss
depends on all of its own outputs that are not padding.
"""

from collections.abc import Callable

import torch
import transformers as hf
from torch import Tensor, nn

LENGTH, WORDS, WIDTH = 6, 19, 16
Batch = dict[str, Tensor]


class Named(nn.Module):
    """A model that takes inputs by name and returns its main output, padding set to zero."""

    def __init__(self, network: nn.Module, output: str = "logits") -> None:
        super().__init__()
        self.network = network
        self.output = output

    def forward(self, **inputs: Tensor) -> Tensor:
        output = getattr(self.network(**inputs), self.output)
        mask = inputs.get("decoder_attention_mask", inputs.get("attention_mask"))
        if mask is not None and output.dim() == 3 and mask.shape == output.shape[:2]:
            output = output * mask[..., None].to(output)
        return output.flatten(1)


def text(records: int) -> Batch:
    """Token ids, and a mask that hides the padding at the end of two records."""
    ids = torch.randint(3, WORDS, (records, LENGTH))
    mask = torch.ones(records, LENGTH, dtype=torch.long)
    mask[0, 4:] = 0
    mask[2:3, 3:] = 0
    ids[mask == 0] = 1
    return {"input_ids": ids, "attention_mask": mask}


def translation(records: int) -> Batch:
    given = text(records)
    ids = torch.randint(3, WORDS, (records, 4))
    mask = torch.ones_like(ids)
    mask[1:2, 2:] = 0
    return {**given, "decoder_input_ids": ids, "decoder_attention_mask": mask}


def _encoder(**more) -> dict:
    return {
        "vocab_size": WORDS,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 20,
        "max_position_embeddings": 12,
        "pad_token_id": 1,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        **more,
    }


def _decoder(**more) -> dict:
    common = _encoder(num_key_value_heads=1, attention_dropout=0.0, bos_token_id=0, eos_token_id=2)
    del common["hidden_dropout_prob"], common["attention_probs_dropout_prob"]
    return common | more


def gpt2(**more) -> hf.GPT2LMHeadModel:
    config = hf.GPT2Config(
        vocab_size=WORDS, n_positions=12, n_embd=WIDTH, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=2, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, **more,
    )  # fmt: skip
    return hf.GPT2LMHeadModel(config)


def bert() -> hf.BertForSequenceClassification:
    return hf.BertForSequenceClassification(hf.BertConfig(**_encoder()))


def _bart() -> nn.Module:
    config = hf.BartConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=1, decoder_layers=1, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=20,
        decoder_ffn_dim=20, max_position_embeddings=12, pad_token_id=1, bos_token_id=0,
        eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=2,
    )  # fmt: skip
    return hf.BartForConditionalGeneration(config)


def _t5() -> nn.Module:
    config = hf.T5Config(
        vocab_size=WORDS, d_model=WIDTH, d_kv=8, d_ff=20, num_layers=1, num_heads=2,
        dropout_rate=0.0, pad_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    return hf.T5ForConditionalGeneration(config)


def _whisper() -> nn.Module:
    config = hf.WhisperConfig(
        vocab_size=WORDS, d_model=WIDTH, encoder_layers=1, decoder_layers=1, dropout=0.0,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=20,
        decoder_ffn_dim=20, num_mel_bins=4, max_source_positions=6, max_target_positions=8,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


def _sounds(records: int) -> Batch:
    ids = torch.randint(3, WORDS, (records, 4))
    return {"input_features": torch.randn(records, 4, 12), "decoder_input_ids": ids}


def _wave(records: int) -> Batch:
    mask = torch.ones(records, 80, dtype=torch.long)
    mask[1:2, 50:] = 0
    return {"input_values": torch.randn(records, 80), "attention_mask": mask}


def _wav2vec2() -> nn.Module:
    config = hf.Wav2Vec2Config(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        conv_dim=(8, 8), conv_stride=(5, 2), conv_kernel=(5, 3), num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, feat_extract_norm="layer", do_stable_layer_norm=True,
        vocab_size=8, hidden_dropout=0.0, attention_dropout=0.0, activation_dropout=0.0,
        feat_proj_dropout=0.0, final_dropout=0.0, layerdrop=0.0, apply_spec_augment=False,
    )  # fmt: skip
    return hf.Wav2Vec2ForSequenceClassification(config)


def _image(records: int) -> Batch:
    return {"pixel_values": torch.randn(records, 3, 8, 8)}


def _tokens(records: int) -> Batch:
    return {"input_ids": text(records)["input_ids"]}


def _lora(model: nn.Module, targets: list[str]) -> nn.Module:
    import peft

    config = peft.LoraConfig(r=2, lora_alpha=4, target_modules=targets, init_lora_weights=False)
    return peft.get_peft_model(model, config)


def _longformer() -> nn.Module:
    config = hf.LongformerConfig(**_encoder(max_position_embeddings=16), attention_window=4)
    return hf.LongformerForSequenceClassification(config)


def _deberta() -> nn.Module:
    config = hf.DebertaV2Config(
        **_encoder(), relative_attention=True, position_buckets=4, norm_rel_ebd="layer_norm",
        pos_att_type=["p2c", "c2p"], share_att_key=True, position_biased_input=False,
        type_vocab_size=0, pooler_dropout=0.0,
    )  # fmt: skip
    return hf.DebertaV2ForSequenceClassification(config)


def _xlnet() -> nn.Module:
    config = hf.XLNetConfig(
        vocab_size=WORDS, d_model=WIDTH, n_layer=2, n_head=2, d_inner=20, dropout=0.0,
        pad_token_id=1, summary_last_dropout=0.0,
    )  # fmt: skip
    return hf.XLNetForSequenceClassification(config)


def _mamba() -> nn.Module:
    config = hf.MambaConfig(
        vocab_size=WORDS, hidden_size=WIDTH, state_size=4, num_hidden_layers=2, pad_token_id=1,
        bos_token_id=0, eos_token_id=2, time_step_rank=2,
    )  # fmt: skip
    return hf.MambaForCausalLM(config)


def _swin() -> nn.Module:
    config = hf.SwinConfig(
        image_size=8, patch_size=2, embed_dim=8, depths=[2, 1], num_heads=[2, 2], window_size=2,
        drop_path_rate=0.0,
    )  # fmt: skip
    return hf.SwinForImageClassification(config)


def _vit() -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=WIDTH, num_hidden_layers=1, num_attention_heads=2, intermediate_size=20,
        image_size=8, patch_size=4,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def _distilbert() -> nn.Module:
    config = hf.DistilBertConfig(
        vocab_size=WORDS, max_position_embeddings=12, n_layers=2, n_heads=2, dim=WIDTH,
        hidden_dim=20, dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, pad_token_id=1,
    )  # fmt: skip
    return hf.DistilBertForSequenceClassification(config)


def _albert() -> nn.Module:
    config = hf.AlbertConfig(**_encoder(embedding_size=8), classifier_dropout_prob=0.0)
    return hf.AlbertForSequenceClassification(config)


def _electra() -> nn.Module:
    config = hf.ElectraConfig(**_encoder(embedding_size=8))
    return hf.ElectraForSequenceClassification(config)


def _roberta() -> nn.Module:
    return hf.RobertaForSequenceClassification(
        hf.RobertaConfig(**_encoder(bos_token_id=0, eos_token_id=2))
    )


def _fnet() -> nn.Module:
    return hf.FNetForSequenceClassification(hf.FNetConfig(**_encoder()))


def _gemma() -> nn.Module:
    return hf.GemmaForCausalLM(hf.GemmaConfig(**_decoder(head_dim=8)))


Maker = Callable[[], nn.Module]
ZOO: dict[str, tuple[Maker, Callable[[int], Batch]]] = {
    "bert": (bert, text),
    "bert-masked-lm": (lambda: hf.BertForMaskedLM(hf.BertConfig(**_encoder())), text),
    "albert": (_albert, text),
    "electra": (_electra, text),
    "roberta": (_roberta, text),
    "distilbert": (_distilbert, text),
    "deberta-v2": (_deberta, text),
    "xlnet": (_xlnet, text),
    "longformer": (_longformer, text),
    "fnet": (_fnet, _tokens),
    "gpt2": (gpt2, text),
    "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**_decoder())), text),
    "qwen2": (lambda: hf.Qwen2ForCausalLM(hf.Qwen2Config(**_decoder())), text),
    "gemma": (_gemma, text),
    "mistral": (lambda: hf.MistralForCausalLM(hf.MistralConfig(**_decoder(head_dim=8))), text),
    "mamba": (_mamba, text),
    "bart": (_bart, translation),
    "t5": (_t5, translation),
    "whisper": (_whisper, _sounds),
    "wav2vec2": (_wav2vec2, _wave),
    "vit": (_vit, _image),
    "swin": (_swin, _image),
    "lora-gpt2": (lambda: _lora(gpt2(), ["c_attn"]), text),
    "lora-bert": (lambda: _lora(bert(), ["query", "value"]), text),
}


def make(name: str, records: int = 3) -> tuple[nn.Module, Batch]:
    """Return a model of the zoo, in training mode and float64, and a batch for it."""
    torch.manual_seed(0)
    build, inputs = ZOO[name]
    model = Named(build()).double().train()
    return model, inputs(records)


def loop(model: nn.Module, batch: Batch, loss: Callable) -> dict[nn.Parameter, Tensor]:
    """Return {parameter: [records, *shape]} by autograd alone, one record at a time."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    rows = []
    for i in range(len(next(iter(batch.values())))):
        value = loss(model(**{key: values[i : i + 1] for key, values in batch.items()})).sum()
        back = torch.autograd.grad(value, parameters, allow_unused=True)
        pairs = zip(parameters, back, strict=True)
        rows.append([torch.zeros_like(p) if g is None else g for p, g in pairs])
    return {p: torch.stack([row[k] for row in rows]) for k, p in enumerate(parameters)}
