"""Only the private step may bring private data into the model.

The attacks: a second optimizer, the step's own optimizer on un-noised gradients, writes by hand,
by hooks and by the forward pass, between and inside private steps. And the opposite mistake: an
optimizer that does nothing while every step is paid for.
"""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim.optimizer import register_optimizer_step_post_hook

import ownerwise as ow
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

DATA = torch.randn(tools.RECORDS, 4), torch.arange(tools.RECORDS) % 3


class Loop:
    """A private run of one's own, one step at a time."""

    def __init__(self, optimizer=torch.optim.SGD, seed=None, model=None, **options):
        self.model = tools.mlp() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.1, **options)
        stream = None if seed is None else tools.seeded(seed)
        self.step = ow.PrivateStep(
            self.model, tools.make_plan(), self.optimizer, functional.cross_entropy, stream=stream
        )
        self.batches = iter(ow.PoissonBatches(DATA, tools.make_plan(), stream=stream))

    def take(self, steps=1):
        for _ in range(steps):
            self.step(next(self.batches))
        return self

    def backward(self):
        functional.cross_entropy(self.model(DATA[0]), DATA[1]).backward()


def own_step(loop):
    loop.backward()
    loop.optimizer.step()


def foreign(kind, **options):
    def write(loop):
        loop.backward()
        kind(loop.model.parameters(), lr=0.1, **options).step()

    return write


@torch.no_grad()
def by_hand(loop):
    loop.model[0].weight.add_(DATA[0].mean())


@torch.no_grad()
def through_a_view(loop):
    loop.model[0].weight[:1].copy_(DATA[0][:1])


def through_detach(loop):
    loop.model[2].weight.detach().mul_(1.5)


def through_data(loop):
    """Without a trace in the version counters, to all parameters as an optimizer does."""
    for parameter in loop.model.parameters():
        parameter.data.add_(DATA[0].mean())


def loading(loop):
    loop.model.load_state_dict({k: v + 1 for k, v in loop.model.state_dict().items()})


def replacing(loop):
    loop.model[2].weight = nn.Parameter(DATA[0][:3, :1].expand(3, 7).clone())


def frozen_and_written(loop):
    loop.model[0].weight.requires_grad_(False)
    loop.model[0].weight.add_(1)


WRITES = {
    "own optimizer": own_step,
    "SGD": foreign(torch.optim.SGD),
    "Adam": foreign(torch.optim.Adam),
    "fused SGD": foreign(torch.optim.SGD, fused=True),
    "fused AdamW": foreign(torch.optim.AdamW, fused=True),
    "single tensors": foreign(torch.optim.Adam, foreach=False),
    "by hand": by_hand,
    "view": through_a_view,
    "detach": through_detach,
    "data": through_data,
    "load_state_dict": loading,
    "replaced parameter": replacing,
    "frozen parameter": frozen_and_written,
}


@pytest.mark.parametrize("way", WRITES)
def test_an_undeclared_change_of_the_model_ends_a_private_run(way, tmp_path):
    loop = Loop().take(2)
    WRITES[way](loop)
    with pytest.raises(ow.OwnerwiseError, match=r"with step\.data_free_changes\(\)"):
        loop.take()
    if way != "replaced parameter":  # found in the next step only
        assert loop.step.steps_spent == 2
        with pytest.raises(ow.OwnerwiseError, match="NOT private"):
            loop.step.save(tmp_path)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("way", WRITES)
def test_runs_that_are_not_private_may_change_the_model(way):
    loop = Loop(seed=3).take(2)
    WRITES[way](loop)
    loop.take()
    assert loop.step.steps_spent == 3


@pytest.mark.parametrize("way", ["by hand", "load_state_dict", "data", "frozen parameter"])
def test_a_declared_change_is_kept(way):
    loop = Loop().take(2)
    with loop.step.data_free_changes():
        WRITES[way](loop)
        written = copy.deepcopy(loop.model.state_dict())
    assert all(torch.equal(written[k], v) for k, v in loop.model.state_dict().items())
    loop.take(2)
    assert loop.step.private
    by_hand(loop)
    with pytest.raises(ow.OwnerwiseError, match="changed since the last private step"):
        loop.take()


def test_a_declaration_does_not_cover_what_came_before_it():
    loop = Loop().take()
    own_step(loop)
    with (
        pytest.raises(ow.OwnerwiseError, match="changed since the last private step"),
        loop.step.data_free_changes(),
    ):
        pytest.fail("the context must not be entered")


def test_a_layer_may_be_replaced_by_declaration():
    loop = Loop().take()
    with loop.step.data_free_changes():
        replacing(loop)
        loop.optimizer.add_param_group({"params": [loop.model[2].weight]})
    before = loop.model[2].weight.detach().clone()
    loop.take()
    assert not torch.equal(before, loop.model[2].weight)


def test_initial_weights_may_be_loaded_after_the_step_is_built():
    loop = Loop()
    loading(loop)
    assert loop.take(6).step.private


@pytest.mark.parametrize(
    "change",
    [
        lambda loop: loop.optimizer.param_groups[0].update(lr=0.01),
        lambda loop: loop.backward(),  # the step discards these gradients
        lambda loop: loop.model.eval(),
        lambda loop: loop.model.state_dict(),
        lambda loop: copy.deepcopy(loop.model)[0].weight.data.zero_(),
        lambda loop: loop.model(DATA[0]),
        lambda loop: torch.optim.lr_scheduler.StepLR(loop.optimizer, 1).step(),
    ],
)
@pytest.mark.filterwarnings("ignore:Detected call of")
def test_what_leaves_the_parameters_alone_needs_no_declaration(change):
    loop = Loop().take(2)
    change(loop)
    assert loop.take(2).step.private


def test_a_restored_run_is_watched_from_the_start(tmp_path):
    Loop().take(2).step.save(tmp_path)
    loop = Loop()
    loop.step.restore(tmp_path)
    own_step(loop)
    batches = ow.PoissonBatches(DATA, tools.make_plan(), start=2)
    with pytest.raises(ow.OwnerwiseError, match="changed since the last private step"):
        loop.step(next(iter(batches)))


def test_step_hooks_of_an_optimizer_are_refused_in_private_runs():
    for register in ("register_step_post_hook", "register_step_pre_hook"):
        loop = Loop().take()
        handle = getattr(loop.optimizer, register)(lambda *_, loop=loop: by_hand(loop))
        with pytest.raises(ow.OwnerwiseError, match="step hooks"):
            loop.take()
        assert loop.step.steps_spent == 1
        handle.remove()
    loop = Loop().take()
    handle = register_optimizer_step_post_hook(lambda *_: by_hand(loop))
    try:
        with pytest.raises(ow.OwnerwiseError, match="step hooks"):
            loop.take()
        Loop(seed=1).take()
    finally:
        handle.remove()


def test_a_loss_or_a_hook_that_writes_to_the_parameters_is_refused():
    loop = Loop()
    loop.model[0].register_forward_hook(lambda *_: by_hand(loop))
    with pytest.raises(ow.OwnerwiseError):
        loop.take()
    model = tools.mlp()

    def writing(outputs, targets):
        with torch.no_grad():
            model[0].bias.add_(1e-3)
        return functional.cross_entropy(outputs, targets, reduction="none")

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = ow.PrivateStep(model, tools.make_plan(), optimizer, writing)
    with pytest.raises(ow.OwnerwiseError):
        step(next(iter(ow.PoissonBatches(DATA, tools.make_plan()))))
    assert step.updates == 0


class Accumulating(torch.optim.Optimizer):
    """As accelerate wraps an optimizer: while it accumulates, `step` does nothing."""

    def __init__(self, optimizer, every):
        self.optimizer, self.every, self.calls = optimizer, every, 0
        self.param_groups, self.state = optimizer.param_groups, optimizer.state

    def step(self, closure=None):
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step()

    def zero_grad(self, set_to_none=None):
        if self.calls % self.every == 0:
            self.optimizer.zero_grad()


class Passing(Accumulating):
    def __init__(self, parameters, lr, every=1, kind=torch.optim.SGD, **options):
        super().__init__(kind(parameters, lr=lr, **options), every)


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"kind": torch.optim.Adam}])
@pytest.mark.parametrize("seed", [None, 3])
def test_an_optimizer_that_skips_its_step_is_refused(seed, options):
    loop = Loop(Passing, seed=seed, every=3, **options)
    with pytest.raises(ow.OwnerwiseError, match="did not update the model"):
        loop.take()
    assert (loop.step.steps_spent, loop.step.updates) == (1, 0)
    assert Loop(Passing, seed=seed, every=1, **options).take(6).step.updates == 6


class WritingData(torch.optim.Optimizer):
    """As older optimizers write: through `.data`, which version counters do not see."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.add_(parameter.grad, alpha=-group["lr"])


def kinds():
    names = ("SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD")
    for name in names:
        yield name, getattr(torch.optim, name), {}
    yield "fused Adam", torch.optim.Adam, {"fused": True}
    yield "single tensors", torch.optim.SGD, {"foreach": False}
    yield "through .data", WritingData, {}


@pytest.mark.parametrize(("kind", "options"), [pytest.param(k, o, id=n) for n, k, o in kinds()])
def test_optimizers_that_update_the_model_are_fine_also_at_learning_rate_0(kind, options):
    loop = Loop(kind, **options)
    loop.optimizer.param_groups[0]["lr"] = 0.0  # a warm-up may start there
    loop.take()
    loop.optimizer.param_groups[0]["lr"] = 0.1
    assert loop.take(3).step.private


def test_frozen_layers_do_not_count_as_skipped():
    loop = Loop()
    loop.model[0].requires_grad_(False)
    assert loop.take(2).step.updates == 2
    with loop.step.data_free_changes():
        loop.model[0].requires_grad_(True)
        loop.model[2].requires_grad_(False)
    assert loop.take(2).step.updates == 4


def test_an_optimizer_that_fails_midway_leaves_a_run_that_can_go_on():
    class Failing(torch.optim.SGD):
        fails = False

        def step(self, closure=None):
            super().step()
            if Failing.fails:
                raise RuntimeError("out of memory")

    loop = Loop(Failing).take()
    Failing.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.take()
    Failing.fails = False
    loop.take()
    assert (loop.step.steps_spent, loop.step.updates) == (3, 2)


def test_a_private_run_with_averages_and_evaluations_is_not_disturbed(tmp_path):
    trainer = ow.Trainer(
        tools.mlp(), tools.make_plan(), lr=0.1, averaging=0.5, evaluate_every=1,
        folder=tmp_path / "run", progress=False,
    )  # fmt: skip
    run = trainer.fit(DATA, validation=tuple(part.clone() for part in DATA))
    assert run.private
    assert len(run.history) == 7


def test_a_logger_that_trains_on_the_side_stops_the_run():
    model = tools.mlp()

    class Sneaky:
        def start(self, run): ...

        def log(self, line):
            functional.cross_entropy(model(DATA[0]), DATA[1]).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()

        def finish(self, run): ...

    trainer = ow.Trainer(
        model, tools.make_plan(), lr=0.1, evaluate_every=1, loggers=[Sneaky()], progress=False
    )
    with pytest.raises(ow.OwnerwiseError, match="changed since the last private step"):
        trainer.fit(DATA)
