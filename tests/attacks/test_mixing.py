"""Losses, clipping rules, releases and models through which a record reaches the others.

The attacks measure how far removing one record moves the sum, in clip norms C: [B, 1] against [B]
511, loss / number of positives 957, loss / largest loss 317, a rule divided by the longest norm
380, a release centred by its batch mean 393. Each of them is refused now.
"""

import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.step import separation
from tools import step_tools as tools

OWNERS = ow.Owners(np.zeros(4000, dtype=int), {0: 4.0}, 1e-5)


@pytest.fixture
def _threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def plan_of(**options):
    return ow.plan(OWNERS, "uniform", **{"steps": 40, "batch_size": 400, **options})


PLAN, HARDENED = plan_of(), plan_of(hardened=True)


def cross_entropy(out, y):
    return functional.cross_entropy(out, y, reduction="none")


def step_of(loss, *, plan=PLAN, model=None, private=False, **options):
    torch.manual_seed(0)
    model = nn.Linear(5, 3) if model is None else model
    stream = None if private else tools.seeded()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    return ow.PrivateStep(model, plan, optimizer, loss, stream=stream, **options)


def data_of(count, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 5, generator=generator).to(dtype)
    return inputs, torch.randint(0, 3, (count,), generator=generator)


def batch_of(inputs, targets, step=0):
    count = len(targets)
    return ow.Batch(step, np.arange(count), np.zeros(count, dtype=np.int64), (inputs, targets))


def take_steps(step, inputs, targets, stop, start=0):
    for number in range(start, stop):
        step(batch_of(inputs, targets, number))


def by_positives(out, y):
    return cross_entropy(out, y) / (y == 1).sum()


def by_the_largest(out, y):
    losses = cross_entropy(out, y)
    return losses / losses.max().detach()


def by_length(out, y):
    return cross_entropy(out, y) / len(out)


def by_the_mean(out, y):
    losses = cross_entropy(out, y)
    return losses / losses.mean()


def the_hardest(out, y):
    losses = cross_entropy(out, y)
    return torch.where(losses >= losses.detach().quantile(0.9), losses, 0.0)


def shifted(out, y):
    losses = cross_entropy(out, y)
    return losses - losses.detach().max()


MIXING = [by_positives, by_the_largest, by_length, by_the_mean, the_hardest, shifted]


@pytest.mark.parametrize("loss", MIXING, ids=lambda loss: loss.__name__)
@pytest.mark.parametrize("micro", [None, 37])
@pytest.mark.parametrize("plan", [PLAN, HARDENED], ids=["ordinary", "hardened"])
@pytest.mark.parametrize(
    ("_threads", "dtype"), [(1, torch.float32), (2, torch.float64)], indirect=["_threads"]
)
@pytest.mark.usefixtures("_threads")
def test_a_loss_that_mixes_records_is_refused_at_once(loss, micro, plan, dtype):
    step = step_of(
        loss,
        plan=plan,
        model=nn.Linear(5, 3).to(dtype),
        performance=ow.Performance(micro_batch_size=micro),
    )
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records") as refusal:
        step(batch_of(*data_of(380, dtype)))  # rows of a hardened plan are mostly filled
    assert not re.search(r"\d", str(refusal.value))
    assert step.steps_spent == 1
    assert step.updates == 0


@pytest.mark.parametrize("loss", MIXING, ids=lambda loss: loss.__name__)
def test_a_nan_record_does_not_switch_the_check_off(loss):
    inputs, targets = data_of(120)
    inputs[3] = float("nan")
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        step_of(loss)(batch_of(inputs, targets))
    step_of(cross_entropy)(batch_of(inputs, targets))


@pytest.mark.parametrize("loss", [by_the_largest, by_positives], ids=lambda loss: loss.__name__)
def test_mixing_that_begins_late_is_found_within_a_few_steps(loss):
    """Any pair of records is looked at apart with probability 1/4 or more in each step."""
    late = {"yes": False}
    step = step_of(lambda out, y: loss(out, y) if late["yes"] else cross_entropy(out, y))
    inputs, targets = data_of(60)
    take_steps(step, inputs, targets, 9)
    late["yes"] = True
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        take_steps(step, inputs, targets, 39, start=9)


@pytest.mark.parametrize("loss", [functional.mse_loss, nn.MSELoss()])
@pytest.mark.parametrize("swapped", [False, True])
def test_shapes_that_broadcast_are_refused_outright(loss, swapped):
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)) if swapped else nn.Linear(5, 1)
    targets = torch.randn(30, 1) if swapped else torch.randn(30)
    with pytest.raises(ow.OwnerwiseError, match=r"expected \[records(, 1)?\], like the outputs"):
        step_of(loss, model=model)(batch_of(torch.randn(30, 5), targets))


def leaking(amount):
    """Each loss is larger by a tiny factor if record 0 (marked by a huge feature) is there."""

    def loss(out, y):
        marked = (out.detach().abs().max() > 50).to(out)
        return cross_entropy(out, y) * (1 + amount * marked)

    return loss


@pytest.mark.parametrize("records", [100, 2000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mixing_below_the_tolerance_moves_the_sum_by_a_hundredth(records, dtype):
    inputs, targets = data_of(records, dtype)
    inputs[0] = 1e3
    below, above = 0.5 * separation.ROOM / records, 4 * separation.ROOM / records

    def moved(amount):
        model = nn.Linear(5, 3).to(dtype)
        with torch.no_grad():
            model.weight.fill_(0.1).add_(torch.arange(3).to(dtype)[:, None] / 50)
        step = step_of(leaking(amount), model=model)
        whole = tools.flat(step.clipped_sum(batch_of(inputs, targets)))
        rest = tools.flat(step.clipped_sum(batch_of(inputs[1:], targets[1:])))
        return float((whole - rest).norm())

    clip_norm = float(PLAN.clip_norms[0])
    assert moved(below) <= 1.01 * clip_norm
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        moved(above)


LEGITIMATE = {
    "cross entropy": (functional.cross_entropy, 3, "classes"),
    "weighted": (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 5.0])), 3, "classes"),
    "smoothed": (nn.CrossEntropyLoss(label_smoothing=0.1), 3, "classes"),
    "squares": (functional.mse_loss, 3, "numbers"),
    "huber": (nn.HuberLoss(), 3, "numbers"),
    "binary": (functional.binary_cross_entropy_with_logits, 3, "flags"),
    "focal": (
        lambda out, y: (1 - torch.exp(-cross_entropy(out, y))) ** 2 * cross_entropy(out, y),
        3,
        "classes",
    ),
}


@pytest.mark.parametrize("name", LEGITIMATE)
@pytest.mark.parametrize(
    ("records", "hardened"),
    [(2, False), (3, False), (7, False), (400, False), (400, True), (20_000, False)],
)
@pytest.mark.parametrize("size", [1.0, 100.0])
def test_legitimate_losses_pass_at_any_size(name, records, size, hardened):
    plan = HARDENED if hardened else PLAN
    loss, outputs, kind = LEGITIMATE[name]
    inputs, classes = data_of(records)
    targets = {
        "classes": classes,
        "numbers": size * torch.randn(records, outputs),
        "flags": torch.randint(0, 2, (records, outputs)).float(),
    }[kind]
    model = nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, outputs))
    step = step_of(
        loss,
        plan=plan,
        model=model,
        performance=ow.Performance(micro_batch_size=None if records < 99 else 4096),
    )
    take_steps(step, size * inputs, targets, 3)


class Autocast(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 64), nn.ReLU(), nn.Linear(64, 3))

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.layers(x)


@pytest.mark.parametrize("loss", [functional.cross_entropy, lambda o, y: o.float().exp().sum(1)])
@pytest.mark.parametrize("records", [60, 3000])
def test_bfloat16_models_pass_and_mixing_ones_do_not(loss, records):
    take_steps(step_of(loss, model=Autocast()), *data_of(records), 5)
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        take_steps(step_of(by_the_largest, model=Autocast()), *data_of(records), 5)


class ByLongest(ow.mechanisms.ClippingRule):
    """A rule that declares itself proven and divides by the longest norm of the batch."""

    randomised = False
    proven = True

    def factors(self, norms, clip_norms, stream):
        return clip_norms / norms.max()


class DrawsMore(ow.Standard):
    randomised = True
    mixes = False

    def factors(self, norms, clip_norms, stream):
        draws = torch.from_numpy(stream.uniforms(len(norms))).to(norms)
        draws = draws / draws.max() if self.mixes else draws
        return super().factors(norms, clip_norms, None) * draws


@pytest.mark.parametrize("micro", [None, 17])
def test_a_rule_that_mixes_records_is_refused(micro):
    step = step_of(
        cross_entropy, clipping=ByLongest(), performance=ow.Performance(micro_batch_size=micro)
    )
    with pytest.raises(ow.OwnerwiseError, match="the factor of a record changes"):
        take_steps(step, *data_of(60), 20)
    mixing = type("Mixing", (DrawsMore,), {"mixes": True})()
    with pytest.raises(ow.OwnerwiseError, match="the factor of a record changes"):
        take_steps(step_of(cross_entropy, clipping=mixing), *data_of(60), 20)


def test_a_randomised_rule_of_ones_own_keeps_its_random_numbers():
    batch = batch_of(*data_of(60))
    randomness = [
        ow.mechanisms.Randomness(rule=tools.seeded().child("rule").at_step(0)) for _ in range(2)
    ]
    step = step_of(cross_entropy, clipping=DrawsMore(), not_private=True)
    step.clipped_sum(batch, randomness[0])
    expected = torch.from_numpy(tools.seeded().child("rule").at_step(0).uniforms(60))
    peek = step.peek
    plain = np.minimum(1, PLAN.clip_norms[0] / (1 + step.slack) / peek.norms)
    np.testing.assert_allclose(peek.factors, plain * expected.numpy(), rtol=1e-5)
    assert randomness[0].rule._position == 60


class Centred(ow.mechanisms.Release):
    shape = (3,)

    def contributions(self, outputs, targets):
        return outputs - outputs.mean(dim=0)


class Remembers(ow.mechanisms.Release):
    """Divides by the largest output so far, which it keeps between calls."""

    shape = (3,)

    def __init__(self):
        self.largest = 1e-6

    def contributions(self, outputs, targets):
        self.largest = max(self.largest, float(outputs.abs().max()))
        return outputs / self.largest


class LargestByCell(ow.mechanisms.Release):
    shape = (3, 3)

    def contributions(self, outputs, targets):
        return ow.mechanisms.Cells(outputs / outputs.abs().max(), targets)


class LowPrecision(ow.mechanisms.Release):
    """Cannot run in float64, and its own type would hide a tenth of a contribution."""

    shape = (3,)

    def contributions(self, outputs, targets):
        return (outputs @ torch.eye(3)).bfloat16() + 0.05 * outputs.mean(dim=0).bfloat16()


@pytest.mark.parametrize("micro", [None, 17])
@pytest.mark.parametrize("kind", [Remembers, LargestByCell, LowPrecision])
def test_a_release_that_remembers_or_divides_by_the_largest_is_refused_at_once(kind, micro):
    options = {
        "plan": plan_of(release_std=4.0),
        "performance": ow.Performance(micro_batch_size=micro),
    }
    step = step_of(lambda out, y, _: cross_entropy(out, y), release=kind(), **options)
    with pytest.raises(ow.OwnerwiseError, match="the contribution of a record changes"):
        take_steps(step, *data_of(60), 1)


@pytest.mark.parametrize("micro", [None, 17])
def test_a_release_that_mixes_records_is_refused(micro):
    plan = plan_of(release_std=4.0)
    options = {"plan": plan, "performance": ow.Performance(micro_batch_size=micro)}
    step = step_of(lambda out, y, _: cross_entropy(out, y), release=Centred(), **options)
    with pytest.raises(ow.OwnerwiseError, match="Centred: the contribution of a record changes"):
        step(batch_of(*data_of(60)))
    step = step_of(lambda o, y, _: cross_entropy(o, y), release=tools.CountClasses(), **options)
    take_steps(step, *data_of(60), 3)


class Centring(nn.Module):
    """Mixes records once it is switched on."""

    def __init__(self, mix):
        super().__init__()
        self.layer, self.mix, self.on = nn.Linear(5, 3), mix, True

    def forward(self, x):
        return self.layer(self.mix(x) if self.on else x)


MIXES = {
    "mean": lambda x: x - x.mean(dim=0),
    "attention": lambda x: x + (x @ x.T).softmax(dim=1) @ x,
    "running sum": lambda x: x.cumsum(dim=0),
    "length": lambda x: x / len(x),
    "neighbour": lambda x: x + 1e-3 * x.roll(1, 0),
    "rarely": lambda x: x * (1 + (x.abs().max() > 4).to(x)),
}


@pytest.mark.parametrize(
    ("name", "dropout"),  # a random model is compared at one size
    [(name, False) for name in MIXES] + [(name, True) for name in MIXES if name != "length"],
)
def test_a_model_that_mixes_records_is_refused_whenever_it_begins(name, dropout):
    mixing = Centring(MIXES[name])
    model = nn.Sequential(nn.Dropout(0.3), mixing) if dropout else mixing
    mixing.on = False
    step = step_of(cross_entropy, model=model)
    inputs, targets = data_of(60)
    inputs[7, 0] = 4.5
    take_steps(step, inputs, targets, 3)
    mixing.on = True
    with pytest.raises(ow.OwnerwiseError, match=r"of a record changes with|told apart"):
        take_steps(step, inputs, targets, 33, start=3)


def test_through_the_trainer_in_a_private_run(tmp_path):
    model, folder = nn.Linear(5, 3), tmp_path / "run"
    trainer = ow.Trainer(model, PLAN, lr=0.1, loss=by_the_largest, folder=folder)
    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        trainer.fit(data_of(4000))
    again = step_of(cross_entropy, model=nn.Linear(5, 3), private=True)
    again.restore(folder)
    assert again.steps_spent == 1
    assert again.updates == 0


def in_float32_alone(out, y):
    return cross_entropy(out, y) if out.dtype == torch.float64 else by_the_largest(out, y)


def rounded_by_the_largest(out, y):
    """out + k - k: nothing changes in float64, but float32 forgets small outputs."""
    largest = out.detach().abs().max()
    return cross_entropy(out + largest - largest, y)


def test_mixing_that_float64_hides_is_refused():
    inputs, targets = data_of(100)
    inputs[0] *= 1e8
    for loss in (in_float32_alone, rounded_by_the_largest):
        with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
            take_steps(step_of(loss), inputs, targets, 20)

    def rounded(x):
        return (x + x.abs().max()) - x.abs().max()

    with pytest.raises(ow.OwnerwiseError, match="changes with the other records"):
        take_steps(step_of(cross_entropy, model=Centring(rounded)), inputs, targets, 20)


class Normalised(ow.mechanisms.ClippingRule):
    """Divides by the norm, which is 0 in float32 for gradients of size 1e-24."""

    randomised = False

    def __init__(self, least):
        self.least = least

    def factors(self, norms, clip_norms, stream):
        return clip_norms / (norms + self.least)


def test_a_rule_that_divides_by_vanishing_norms_is_refused():
    def loss(out, y):
        return out.sum(dim=1)

    inputs, targets = data_of(60)
    for model in (nn.Linear(5, 3, bias=False), Centring(lambda x: 1.0 * x)):
        if isinstance(model, Centring):
            model.layer = nn.Linear(5, 3, bias=False)
        step = step_of(loss, model=model, clipping=Normalised(1e-30))
        with pytest.raises(ow.OwnerwiseError, match="exceed its clip norm"):
            step(batch_of(1e-24 * inputs, targets))
        step_of(loss, model=model, clipping=Normalised(1e-8))(batch_of(1e-24 * inputs, targets))
