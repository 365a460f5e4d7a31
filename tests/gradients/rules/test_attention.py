"""Multi-head attention against the loop over records, at random shapes and options."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ownerwise.gradients import Tape
from tools.record_loop import COUNT, FEW, assert_matches_loop

LONGEST = 5


class Attending(nn.Module):
    """Attention to itself or others, with masks made of the records.

    ``to``: ``itself``, ``memory`` (key and value are one tensor), ``two`` (they are not), or
    ``memory by learned queries``.
    """

    def __init__(self, to="itself", mask=None, padding=False, kind="bool", weights="mean", **sizes):
        super().__init__()
        heads = sizes.pop("heads", 2)
        self.layer = nn.MultiheadAttention(heads * sizes.pop("width", 4), heads, **sizes)
        self.to, self.mask, self.padding, self.kind, self.weights = to, mask, padding, kind, weights
        if to == "memory by learned queries":
            self.queries = nn.Parameter(torch.randn(1, LONGEST, self.layer.embed_dim))

    def inputs(self, x):
        if self.to == "itself":
            return x, x, x
        others = torch.cat([x.cos(), x[:, :1].sin()], dim=1)
        if self.to == "two":
            return x, others[..., : self.layer.kdim], others[..., : self.layer.vdim].exp()
        if self.to == "memory":
            return x, others, others
        return self.queries[:, : x.shape[1]].expand(len(x), -1, -1), others, others

    def masks(self, x, key):
        """Every query sees the first key at least."""
        padding = mask = None
        if self.padding:
            padding = key[..., 0] > 0.5
            padding[:, 0] = False
        if self.mask == "causal":
            mask = torch.ones(x.shape[1], key.shape[1], dtype=torch.bool).triu(1)
        elif self.mask == "of records":
            mask = x[..., :1] + key[:, None, :, 0] > 0.5
            mask[..., 0] = False
            mask = mask.repeat_interleave(self.layer.num_heads, dim=0)
        if self.kind == "float":
            padding, mask = (m if m is None else m.to(x.dtype) * -3 for m in (padding, mask))
        return padding, mask

    def forward(self, x):
        query, key, value = self.inputs(x)
        padding, mask = self.masks(x, key)
        if not self.layer.batch_first:
            turned = {t: t.transpose(0, 1) for t in (query, key, value)}  # one tensor stays one
            query, key, value = (turned[t] for t in (query, key, value))
        outputs, attention = self.layer(
            query,
            key,
            value,
            padding,
            need_weights=self.weights != "none",
            attn_mask=mask,
            average_attn_weights=self.weights == "mean",
        )
        outputs = outputs if self.layer.batch_first else outputs.transpose(0, 1)
        parts = [outputs] if attention is None else [outputs, attention]
        return torch.cat([part.flatten(1) for part in parts], dim=1)


@st.composite
def options(draw):
    chosen = {
        "heads": draw(st.integers(1, 3)),
        "width": draw(st.integers(1, 3)),
        "to": draw(st.sampled_from(["itself", "memory", "two", "memory by learned queries"])),
        "mask": draw(st.sampled_from([None, "causal", "of records"])),
        "kind": draw(st.sampled_from(["bool", "float"])),
        "weights": draw(st.sampled_from(["none", "mean", "each"])),
    }
    for name in ("padding", "bias", "batch_first", "add_bias_kv", "add_zero_attn"):
        chosen[name] = draw(st.booleans())
    if chosen["to"] == "two" and draw(st.booleans()):
        size = st.integers(1, chosen["heads"] * chosen["width"])
        chosen["kdim"], chosen["vdim"] = draw(size), draw(size)
    return chosen


MASKED = {"mask": "causal", "padding": True, "batch_first": True}


@settings(FEW, max_examples=25)  # many options
@given(COUNT, st.integers(1, LONGEST), options())
@example(4, 4, {**MASKED})  # as many steps as records
@example(3, 5, {**MASKED, "weights": "none", "batch_first": False})
@example(3, 5, {**MASKED, "bias": False})
@example(3, 5, {**MASKED, "add_bias_kv": True, "add_zero_attn": True})
@example(3, 5, {**MASKED, "to": "two"})
@example(4, 4, {**MASKED, "to": "two", "kdim": 5, "vdim": 7})
@example(4, 4, {**MASKED, "to": "two", "kdim": 5, "vdim": 7, "weights": "none"})
@example(1, 4, {**MASKED, "to": "memory by learned queries"})
def test_attention(count, length, options):
    model = Attending(**options)
    assert_matches_loop(model, torch.randn(count, length, model.layer.embed_dim))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"to": "two", "kdim": 5, "vdim": 7},
        {"add_bias_kv": True, "add_zero_attn": True},
        {"mask": "of records", "kind": "float", "padding": True, "weights": "each"},
        {"to": "memory", "weights": "none"},
    ],
    ids=["itself", "other widths", "extra keys", "masks", "memory"],
)
def test_attention_values_are_torchs(options):
    model = Attending(**{**MASKED, **options})
    x = torch.randn(3, 5, 8)
    with Tape(model):
        ours = model(x)
    torch.testing.assert_close(ours, model(x), rtol=1e-12, atol=1e-12)
