"""Training elsewhere than on the CPU: everything is moved, and nothing but the last bits changes.

No GPU is needed: see `tools.pretend_device`. The tests of real GPUs skip where there is none.
"""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import Dataset

import ownerwise as ow
from ownerwise.batches import device_problems
from ownerwise.marks import mark, marks_of
from ownerwise.mechanisms.constraints import demographic_parity
from tools import step_tools
from tools import training_tools as tools
from tools.pretend_device import PRETEND, Far, PretendDevice

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)
pytestmark = pytest.mark.filterwarnings("ignore:PullAdjustment.*clip norms")
CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: CUDA was not tested")
DEVICES = ["pretend", pytest.param("cuda", marks=CUDA)]


class on:
    """The context in which a device of this name exists, and what torch calls it."""

    def __init__(self, name):
        self.name = str(PRETEND) if name == "pretend" else name
        self.context = PretendDevice()

    def __enter__(self):
        if self.name == "meta":
            self.context.__enter__()
        return self.name

    def __exit__(self, *error):
        if self.name == "meta":
            self.context.__exit__(*error)


STEPS = {
    "plain": {},
    "ino": {"weights": ow.INO()},
    "hardened": {"plan": {"hardened": True}},
    "importance": {"clipping": ow.ImportanceSampling()},
    "release": {"release": step_tools.CountClasses(), "plan": {"release_std": 4.0}},
    "parts": {"performance": ow.Performance(micro_batch_size=5)},
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("kind", "name"),
    [*[("mlp", name) for name in STEPS], ("cnn", "ino"), ("text", "ino"), ("transformer", "ino")],
)
def test_an_own_loop_gives_the_same_model(name, kind, device):
    options = dict(STEPS[name])
    plan = step_tools.make_plan(**options.pop("plan", {}))

    def trained(device):
        model, *data = step_tools.example(kind, step_tools.RECORDS)
        model.to(device)
        step = step_tools.make_step(
            model, lambda outputs, y, *_: functional.cross_entropy(outputs, y, reduction="none"),
            plan=plan, optimizer=torch.optim.Adam(model.parameters(), lr=0.1), **options,
        )  # fmt: skip
        for batch in ow.PoissonBatches(tuple(data), plan, stream=step_tools.seeded(), steps=2):
            step(batch)
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        return torch.cat([p.detach().cpu().flatten() for p in model.parameters()])

    with on(device) as there:
        moved = trained(there)
    torch.testing.assert_close(moved, trained("cpu"), rtol=1e-4, atol=1e-5)


class Rows(Dataset):
    """The records of a tuple, one by one."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets

    def __len__(self):
        return len(self.targets)

    def __getitem__(self, number):
        return self.inputs[number], self.targets[number]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("workers", [None, 0, 1])
def test_batches_are_the_same_ones_on_every_device(workers, device):
    """On a GPU, a batch is copied while the one before it is in use: none may get lost."""
    _, *data = step_tools.example("mlp", step_tools.RECORDS)
    plan = step_tools.make_plan()
    dataset, options = (
        (tuple(data), {}) if workers is None else (Rows(*data), {"num_workers": workers})
    )

    def batches(**where):
        return ow.PoissonBatches(dataset, plan, stream=step_tools.seeded(), **options, **where)

    with on(device) as there:
        found = list(batches(device=there))
        for one, other in zip(found, batches(), strict=True):
            assert one.step == other.step
            assert (one.indices == other.indices).all()
            for tensor, expected in zip(one.data, other.data, strict=True):
                assert tensor.device.type == there
                assert torch.equal(tensor.cpu(), expected)


def runs():
    """Trainers with what is computed outside the step, each with its data."""
    x, y, _ = tools.task()
    part = ow.Partition({"label": (0, 1, 2), "group": (0, 1)})
    cells = part.targets(y, {"group": (x[:, 3] > 0).long().numpy()})
    fair = ow.RateConstraints(demographic_parity(part, "group", max_gap=0.1))
    counts = np.full((len(tools.make_plan().owners.ids), int(y.max()) + 1), 20)
    adjusted = {"repair": ow.PullAdjustment(tau=1.0, counts=counts)}
    weighted = {"loss": nn.CrossEntropyLoss(weight=torch.linspace(1, 2, int(y.max()) + 1))}
    return {
        "plain": ({}, {}, (x, y)),
        "averaging": ({}, {"averaging": 0.9, "schedule": "cosine"}, (x, y)),
        "calibration": ({"calibration": ow.Calibration()}, {}, (x, y)),
        "constraints": ({"constraints": fair}, {"constraints": fair}, (x, cells)),
        "repair": ({}, adjusted, (x, y)),
        "loss module": ({}, weighted, (x, y)),
        "dataset": ({}, {}, Rows(x, y)),
        "owner unit": ({"unit": "owner", "batch_size": 2}, {}, (x, y)),
    }


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "name",
    [
        "plain",
        "averaging",
        "calibration",
        "constraints",
        "repair",
        "loss module",
        "dataset",
        "owner unit",
    ],
)
def test_a_trainer_moves_model_and_data_and_evaluates_there(name, device, tmp_path):
    planned, _, data = runs()[name]
    plan = tools.make_plan(**{"steps": 3, "batch_size": 12, **planned})
    seen = []

    def trained(device, folder):
        model = tools.make_model()
        model.register_forward_hook(lambda *call: seen.append(call[-1].device.type))
        given = runs()[name][1]
        trainer = tools.make_trainer(model=model, plan=plan, device=device, folder=folder, **given)
        run = trainer.fit(data, validation=data)
        return run, run.predict(tools.task()[0][:20])

    with on(device) as there:
        run, predicted = trained(there, tmp_path / "there")
        assert set(seen) == {there}
        assert run.config["device"] == there
    expected_run, expected = trained(None, tmp_path / "here")
    assert (np.asarray(predicted) == np.asarray(expected)).all()
    for one, other in zip(run.history, expected_run.history, strict=True):
        assert one["validation"]["accuracy"] == pytest.approx(
            other["validation"]["accuracy"], abs=1e-6
        )
    stored = tools.stored(tmp_path / "there")
    for key, tensor in tools.stored(tmp_path / "here").items():
        torch.testing.assert_close(stored[key], tensor, rtol=1e-4, atol=1e-5)


def test_a_device_that_does_not_exist_is_one_of_the_problems():
    assert device_problems(None) == device_problems("cpu") == []
    for device in ("cuda:77", "meta", "nonsense", 3.5):
        (problem,) = device_problems(device)
        assert f"device={str(device)!r} cannot be used" in problem
        assert '"cpu" or "cuda"' in problem
    with pytest.raises(ow.OwnerwiseError, match="device='nonsense'") as caught:
        tools.make_trainer(device="nonsense", checkpoint_every=0).fit(tools.data())
    assert len(caught.value.problems) == 2
    with pytest.raises(ow.OwnerwiseError, match="device='nonsense'"):
        ow.PoissonBatches(tools.data(), tools.make_plan(), device="nonsense")
    x, y, _ = tools.task()
    with pytest.raises(ow.OwnerwiseError, match="device='nonsense'"):
        ow.PrivateClassifier(device="nonsense").fit(x.numpy(), y.numpy())


def test_the_pretend_device_notices_what_was_not_moved():
    with PretendDevice():
        there = torch.ones(3).to(PRETEND)
        assert isinstance(there, Far)
        assert float((there * 2).sum()) == 6
        with pytest.raises(RuntimeError, match="same device"):
            _ = there + torch.ones(3)
    with pytest.raises(RuntimeError, match="without numbers"):
        _ = there + torch.ones(3, device="meta")


def test_marks_of_a_model_survive_the_move():
    """Pitfall 65."""
    model = tools.make_model()
    mark(model[0].weight, "trained on the records")
    with PretendDevice():
        run = tools.make_trainer(model=model, device=PRETEND, seed=None).fit(tools.data())
        assert isinstance(model[0].weight, Far)
    assert not run.private
    assert marks_of(model) == ["trained on the records"]


@CUDA
def test_cuda_keeps_a_batch_whole_while_the_next_one_is_copied():
    x = torch.arange(60.0)[:, None].expand(60, 100_000).contiguous()
    plan = step_tools.make_plan()
    for batch in ow.PoissonBatches((x, x[:, 0]), plan, stream=step_tools.seeded(), device="cuda"):
        busy = torch.randn(2000, 2000, device="cuda")
        for _ in range(20):
            busy = busy @ busy / 2000
        inputs, numbers = batch.data
        assert torch.equal(inputs[:, -1].cpu(), numbers.cpu())
        assert numbers.tolist() == batch.indices.tolist()


@CUDA
def test_cuda_sums_are_not_rounded_to_tf32():
    model = nn.Linear(512, 512).cuda()
    step = step_tools.make_step(model, functional.cross_entropy)
    x, y = torch.randn(48, 512), torch.randint(0, 512, (48,))
    totals = []
    for allowed in (False, True):
        torch.backends.cuda.matmul.allow_tf32 = allowed
        totals.append(step_tools.flat(step.clipped_sum(step_tools.batch_of(x, y))))
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.testing.assert_close(totals[0], totals[1], rtol=0, atol=1e-3)
