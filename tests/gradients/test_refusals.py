"""Right or refused: each refusal, and the pre-flight check that lists them all."""

import re

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from ownerwise.gradients import Problem, Refused, Tape, check
from tools.record_loop import Model


def refused(model, x, match):
    tape = Tape(model)

    def step():
        with tape:
            outputs = model(x)
        tape.backward(outputs.reshape(len(x), -1).sin().sum(dim=1))

    with pytest.raises(Refused, match=match) as caught:
        step()
    assert caught.value.problem.remedy
    assert all(p.grad is None for p in model.parameters())


def test_batch_norm():
    refused(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)), torch.randn(5, 3), "mix")
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False))
    refused(plain, torch.randn(5, 3), "mix|changed")


def test_instance_norm_with_running_statistics():
    layer = nn.InstanceNorm1d(3, affine=True, track_running_stats=True)
    refused(layer, torch.randn(5, 3, 4), "running")


@pytest.mark.parametrize(
    "mix",
    [
        lambda h: h - h.mean(dim=0),
        lambda h: h.softmax(dim=0),
        lambda h: h @ (h.t() @ h),
        lambda h: h.flip(0) + h,
        lambda h: h.cumsum(dim=0),
        lambda h: h / h.norm(),
    ],
    ids=["mean", "softmax", "gram", "flip", "cumsum", "norm"],
)
def test_records_that_mix_after_a_layer(mix):
    model = Model(lambda m, x: mix(m.layer(x)), layer=nn.Linear(3, 4))
    refused(model, torch.randn(5, 3), "told apart")
    assert "told apart" in str(check(model, torch.randn(5, 3))[-1])


def test_records_that_mix_before_the_first_layer():
    """No gradient shows it; the pre-flight check changes a record and looks at the others."""
    model = Model(lambda m, x: m.layer(x - x.mean(dim=0)), layer=nn.Linear(3, 4))
    assert any("another record" in p.what for p in check(model, torch.randn(5, 3)))
    model = Model(lambda m, x: m.layer(x) * x.std(dim=0).mean(), layer=nn.Linear(3, 4))
    assert any("another record" in p.what for p in check(model, torch.randn(5, 3)))


MODES = {
    "always": lambda x: x - 1e-6 * x.mean(dim=0),
    "with gradients": lambda x: x - x.mean(dim=0) if torch.is_grad_enabled() else x,
    "without gradients": lambda x: x if torch.is_grad_enabled() else x - x.mean(dim=0),
    "one small output": lambda x: x + 1e-5 * torch.eye(3).to(x)[0] * x.mean(),
    "in float32 alone": lambda x: x if x.dtype == torch.float64 else x + 1e-3 * x.mean(dim=0),
    "repeated records": lambda x: x * (1 + (x[0] == x[1]).all()),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("count", [2, 3, 8])
def test_records_that_mix_in_one_mode_or_very_little(mode, count):
    model = Model(lambda m, x: m.layer(MODES[mode](x)), layer=nn.Linear(3, 4)).float()
    (problem,) = check(model, torch.randn(count, 3, dtype=torch.float32))
    assert "the output for one record depends on another" in problem.what


@pytest.mark.parametrize("count", [2, 3, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_records_that_are_apart_pass_at_any_count(count, dtype):
    layers = [nn.Linear(30, 200), nn.GELU(), nn.Dropout(0.5), nn.LayerNorm(200), nn.Linear(200, 3)]
    assert check(nn.Sequential(*layers).to(dtype), torch.randn(count, 30).to(dtype)) == []


def test_parameter_used_out_of_sight():
    """Pitfall 19: such a parameter would be trained without clipping."""
    model = nn.Linear(3, 4)
    tape = Tape(model)
    with tape:
        outputs = model(torch.randn(5, 3))
    with pytest.raises(Refused, match=r"weight.*does not see"):
        tape.backward(outputs.sum(dim=1) + model.weight.square().sum())
    assert model.weight.grad is None


def test_parameter_in_a_custom_autograd_function():
    """Pitfall 19."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x * w

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g * w, (g * x).sum(dim=0)

    model = Model(
        lambda m, x: Double.apply(m.layer(x), m.w), layer=nn.Linear(3, 4), w=torch.ones(4)
    )
    refused(model, torch.randn(5, 3), "w: it is used where")


def test_parameter_in_compiled_code():
    """Pitfall 19."""
    with pytest.warns(DeprecationWarning, match="jit"):
        traced = torch.jit.trace(nn.Linear(3, 4), torch.randn(2, 3))
    model = nn.Sequential(nn.Linear(3, 3), traced)
    assert any("compiled" in p.what for p in check(model))
    refused(model, torch.randn(5, 3), "does not see")


def test_input_changed_in_place_after_its_use():
    def forward(m, x):
        h = x.cos()
        y = m.layer(h)
        h.mul_(2)
        return y + h

    refused(Model(forward, layer=nn.Linear(3, 3)), torch.randn(5, 3), "changed in place")


def test_parameter_written_into_the_batch():
    def forward(m, x):
        h = m.layer(x)
        h[:, 0] = m.value
        return h

    model = Model(forward, layer=nn.Linear(3, 3), value=torch.ones(()))
    refused(model, torch.randn(5, 3), "written")


def test_parameter_with_an_entry_for_each_record():
    model = Model(lambda m, x: x + m.table, table=torch.randn(5, 3))
    refused(model, torch.randn(5, 3), "entry for each")


def test_buffer_updated_from_the_batch():
    def forward(m, x):
        m.seen.add_(x.detach().sum())
        return m.layer(x)

    model = Model(forward, layer=nn.Linear(3, 3))
    model.register_buffer("seen", torch.zeros(()))
    tape = Tape(model)
    with pytest.raises(Refused, match="seen"), tape:
        model(torch.randn(5, 3))


def test_packed_sequences_in_an_unknown_order():
    """The tape has not seen how the records were sorted, and no layout fits."""

    def forward(m, x):
        mixed = x[torch.tensor([2, 0, 1])]
        packed = pack_padded_sequence(mixed, torch.tensor([4, 3, 2]), batch_first=True)
        return pad_packed_sequence(m.rnn(packed)[0], batch_first=True)[0][torch.tensor([1, 2, 0])]

    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        model = Model(forward, rnn=kind(3, 4, batch_first=True))
        refused(model, torch.randn(3, 4, 3), "told apart")


def test_unbatched_inputs():
    refused(Model(lambda m, x: m.rnn(x)[0], rnn=nn.GRU(3, 4)), torch.randn(5, 3), "told apart")
    attention = nn.MultiheadAttention(4, 2)
    refused(Model(lambda m, x: m.a(x, x, x)[0], a=attention), torch.randn(5, 4), "batch dimension")


def test_recurrence_from_a_parameter():
    start = torch.zeros(1, 5, 4)
    model = Model(lambda m, x: m.rnn(x, m.h)[0], rnn=nn.GRU(3, 4, batch_first=True), h=start)
    refused(model, torch.randn(5, 2, 3), "expand")
    model = Model(
        lambda m, x: m.rnn(x, m.h.expand(-1, len(x), -1).contiguous())[0],
        rnn=nn.GRU(3, 4, batch_first=True),
        h=torch.randn(1, 1, 4),
    )
    from tools.record_loop import assert_matches_loop

    assert_matches_loop(model, torch.randn(5, 2, 3))


def test_embedding_options():
    refused(nn.Embedding(5, 3, scale_grad_by_freq=True), torch.randint(0, 5, (4, 2)), "freq")
    refused(nn.Embedding(5, 3, max_norm=1.0), torch.randint(0, 5, (4, 2)), "max_norm")
    constant = Model(
        lambda m, x: (
            x + functional.embedding(torch.zeros(len(x), 3).long(), m.w, scale_grad_by_freq=True)
        ),
        w=torch.randn(4, 1),
    )
    refused(constant, torch.randn(2, 3, 1), "freq")


def test_call_that_is_not_per_record():
    """The fallback compares single records with the batch before it is relied on."""

    def forward(m, x):
        return functional.scaled_dot_product_attention(x, m.w, x)

    model = Model(forward, w=torch.randn(4, 3))
    refused(model, torch.randn(4, 3), "on a single record|told apart")


def test_bags_that_are_not_the_records():
    def forward(m, x):
        bags = torch.arange(0, x.numel(), 2) + 1  # each ends in the next record
        bags[0] = 0
        return functional.embedding_bag(x.flatten(), m.w, bags)

    (problem,) = check(Model(forward, w=torch.randn(7, 3)), torch.randint(0, 7, (4, 2)))
    assert "depends on another record" in problem.what
    refused(nn.EmbeddingBag(5, 3, max_norm=1.0), torch.randint(0, 5, (4, 2)), "max_norm")


def test_several_results_without_a_rule():
    model = Model(lambda m, x: torch.svd_lowrank(x, q=2, M=m.w)[0], w=torch.randn(4, 3))
    refused(model, torch.randn(4, 3), "several results")


def test_memory_format_dependence():
    def forward(m, x):
        h = m.conv(x)
        return h.as_strided((x.shape[0], 2), (h.stride(0), 1))

    refused(Model(forward, conv=nn.Conv2d(2, 3, 3)), torch.randn(4, 2, 5, 5), "memory format")


def test_wrong_losses():
    tape = Tape(nn.Linear(3, 2))
    with pytest.raises(RuntimeError, match="empty"):
        tape.backward(torch.zeros(3))
    with tape:
        outputs = tape.model(torch.randn(4, 3))
    with pytest.raises(ValueError, match="reduction"):
        tape.backward(outputs.mean())
    with tape:
        outputs = tape.model(torch.randn(4, 3))
    records = tape.backward(outputs.sum(dim=1))
    with pytest.raises(ValueError, match="one factor per record"):
        records.weighted_sum(torch.ones(3))


def test_five_faults_five_remedies():
    model = nn.ModuleDict(
        {
            "batch": nn.BatchNorm2d(8),
            "instance": nn.InstanceNorm2d(8, track_running_stats=True),
            "words": nn.Embedding(5, 3, max_norm=1.0),
            "counted": nn.EmbeddingBag(5, 3, scale_grad_by_freq=True),
            "lazy": nn.LazyLinear(3),
        }
    )
    problems = check(model)
    assert len(problems) == 5
    assert len({p.where for p in problems}) == 5
    assert len({p.remedy for p in problems}) == 5
    assert "nn.GroupNorm(2, 8)" in problems[0].remedy
    assert "Remedy" in str(problems[0])


@pytest.mark.parametrize("channels", [3, 8, 12, 64])
def test_what_replaces_batch_norm_does_not_erase_its_input(channels):
    """On [records, channels], a group of one channel would become zero."""
    (problem,) = check(nn.Sequential(nn.BatchNorm1d(channels)))
    assert f"replace it with nn.LayerNorm({channels})" in problem.remedy
    (problem,) = check(nn.Sequential(nn.BatchNorm2d(channels)))
    groups, given = map(int, re.search(r"nn.GroupNorm\((\d+), (\d+)\)", problem.remedy).groups())
    assert given == channels
    assert channels % groups == 0
    assert groups == 1 or channels // groups >= 4


def test_faults_of_code_are_listed_together():
    """One run of the check on a sample collects what steps would refuse one by one."""

    def forward(m, x):
        h = m.norm(m.layer(x))
        h[:, 0] = m.value
        return h + m.words(torch.zeros(len(x), dtype=torch.long) + (x[:, 0] > 0))

    model = Model(
        forward,
        layer=nn.Linear(3, 4),
        norm=nn.BatchNorm1d(4),
        value=torch.ones(()),
        words=nn.Embedding(3, 4, scale_grad_by_freq=True),
    )
    before = {k: v.clone() for k, v in model.state_dict().items()}
    problems = check(model, torch.randn(5, 3))
    assert [p.where.split(" ")[0] for p in problems[:2]] == ["norm", "words"]
    assert any("written" in p.what for p in problems)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_check_of_other_faults():
    assert [p.what for p in check(nn.Linear(2, 2).requires_grad_(False))] == [
        "no parameter requires a gradient"
    ]
    twisted = Model(lambda m, x: x, w=torch.ones(2, dtype=torch.complex64))
    assert "complex" in check(twisted)[0].what
    assert "`.module`" in check(nn.DataParallel(nn.Linear(2, 2)))[0].remedy
    assert check(nn.Linear(3, 2), torch.randn(4, 3)) == []
    flat = Model(lambda m, x: m.layer(x).sum(), layer=nn.Linear(3, 2))
    assert any("one output per record" in p.remedy for p in check(flat, torch.randn(4, 3)))
    with pytest.raises(ValueError, match="two records"):
        check(nn.Linear(3, 2), torch.randn(1, 3))
    assert isinstance(check(flat, torch.randn(4, 3))[0], Problem)


def test_masks_that_are_the_same_for_all_records():
    """A flag stays a flag when the check replaces a record."""
    layer = nn.TransformerEncoderLayer(4, 2, 5, batch_first=True)  # with dropout
    mask = torch.zeros(3, 5, dtype=torch.bool)
    assert check(layer, torch.randn(3, 5, 4), None, mask) == []


def test_lengths_that_are_the_same_for_all_records():
    """Zeros in their place are not a valid record."""

    def forward(m, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return m.rnn(packed)[1][0]

    model = Model(forward, rnn=nn.GRU(3, 4, batch_first=True))
    assert check(model, torch.randn(3, 5, 3), torch.full((3,), 4)) == []
    assert check(model, torch.randn(3, 5, 3), torch.tensor([4, 2, 4])) == []


def test_a_number_that_is_not_used():
    """A parameter without dimensions gets a gradient of zero."""
    model = Model(lambda m, x: m.layer(x), layer=nn.Linear(3, 2), number=torch.ones(()))
    tape = Tape(model)
    with tape:
        outputs = model(torch.randn(4, 3))
    sums = tape.backward(outputs.sum(dim=1)).weighted_sum(torch.ones(4))
    assert sums[model.number] == 0
