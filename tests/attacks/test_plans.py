"""Plans that promise less privacy than their owners were told must not train.

The attacks: a copy with less noise, a write to an array of the plan or of its owners, through the
array, its flags, its base, a copy or a pickle, before and after the step is built; and batches that
were not drawn by the plan but say that they were.
"""

import copy
import dataclasses
import pickle

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import ownerwise as ow
from ownerwise.accounting import Schedule
from ownerwise.planning import verification
from tools import step_tools as tools

_one_thread = pytest.fixture(autouse=True)(tools.one_thread)

COPIES = {
    "itself": lambda plan: plan,
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda plan: pickle.loads(pickle.dumps(plan)),
    "replace": dataclasses.replace,
}
ARRAYS = ("sampling_rates", "clip_norms", "targets", "deltas", "records")
DATA = torch.randn(tools.RECORDS, 4), torch.zeros(tools.RECORDS, dtype=torch.long)


def own_plan(**options) -> ow.Plan:
    """A plan that no other test holds."""
    return copy.deepcopy(tools.make_plan(**options))


def step_of(plan) -> ow.PrivateStep:
    model = tools.mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ow.PrivateStep(model, plan, optimizer, functional.cross_entropy)


def changed(plan, **values) -> ow.Plan:
    """The plan with fields overwritten past its freeze; what it has cached stays."""
    _ = plan.hash, plan.epsilon()  # caches both
    for name, value in values.items():
        object.__setattr__(plan, name, value)
    return plan


WEAKER = {
    "less noise": lambda p: {"noise_std": p.noise_std / 10},
    "slightly less noise": lambda p: {"noise_std": p.noise_std * 0.99},
    "no noise": lambda p: {"noise_std": 0.0},
    "nan": lambda p: {"noise_std": float("nan")},
    "higher rates": lambda p: {
        "sampling_rates": np.minimum(1, 2 * p.sampling_rates),
        "expected_batch_size": float(np.minimum(1, 2 * p.sampling_rates) @ p.records),
    },
    "longer clip norms": lambda p: {"clip_norms": 100 * p.clip_norms},
    "one longer clip norm": lambda p: {"clip_norms": p.clip_norms * [1, 1, 1.05]},
    "negative clip norms": lambda p: {"clip_norms": -p.clip_norms},
    "fewer clip norms": lambda p: {"clip_norms": p.clip_norms[:2]},
    "more steps": lambda p: {"schedule": type(p.schedule).constant(60)},
    "larger targets": lambda p: {"targets": 10 * p.targets, "noise_std": p.noise_std / 10},
    "larger deltas": lambda p: {"deltas": 1000 * p.deltas, "noise_std": p.noise_std * 0.8},
    "other owners": lambda p: {"owners": ow.Owners(np.arange(60) % 3, {0: 4.0, 1: 4.0, 2: 4.0})},
    "other ids": lambda p: {"owners": ow.Owners(np.arange(60) % 3 + 1, {1: 1.0, 2: 2.0, 3: 4.0})},
    "one owner fewer": lambda p: {"owners": ow.Owners(np.arange(60) % 2, {0: 1.0, 1: 2.0})},
}


@pytest.mark.parametrize("by", ["replace", "overwriting"])
@pytest.mark.parametrize("name", WEAKER)
def test_a_plan_that_spends_more_than_its_owners_allow_is_refused(name, by):
    plan = own_plan()
    values = WEAKER[name](plan)
    weaker = dataclasses.replace(plan, **values) if by == "replace" else changed(plan, **values)
    with pytest.raises(ow.PlanError):
        weaker.verify()
    with pytest.raises(ow.PlanError):
        ow.PoissonBatches(DATA, weaker)
    with pytest.raises(ow.OwnerwiseError):
        step_of(weaker)


def test_the_trainer_refuses_such_a_plan_and_names_all_problems():
    plan = own_plan()
    weaker = changed(plan, noise_std=plan.noise_std * 0.99)
    trainer = ow.Trainer(tools.mlp(), weaker, lr=0.1, evaluate_every=0, progress=False)
    with pytest.raises(ow.OwnerwiseError, match=r"every is 0(.|\n)*spend more than budgeted"):
        trainer.fit(DATA)


def test_a_run_accounts_with_the_verified_plan():
    plan = own_plan()
    trainer = ow.Trainer(tools.mlp(), plan, lr=0.1, progress=False)
    honest, epsilon = plan.hash, plan.epsilon()
    run = trainer.fit(DATA)
    changed(plan, noise_std=100.0)
    assert run.plan.hash == honest
    np.testing.assert_array_equal(run.epsilon(), epsilon)


@pytest.mark.parametrize("way", COPIES)
def test_no_array_of_a_plan_or_its_owners_can_be_written_to(way):
    plan = COPIES[way](own_plan())
    arrays = [getattr(plan, name) for name in ARRAYS]
    owners = plan.owners
    assert owners is not None
    arrays += [owners.ids, owners.epsilon, owners.delta, owners.records, owners.record_owner_index]
    for array in arrays:
        while isinstance(array, np.ndarray):
            with pytest.raises(ValueError, match="read-only"):
                array[:1] = 0
            with pytest.raises(ValueError, match="WRITEABLE"):
                array.setflags(write=True)
            array = array.base
    assert step_of(plan).plan == plan


@pytest.mark.parametrize("way", COPIES)
def test_arrays_given_to_owners_and_plans_are_copied(way):
    epsilon, record_owner = np.array([1.0, 2.0]), np.array([0, 1, 1])
    owners = ow.Owners(record_owner, epsilon, 1e-5)
    rates = np.array([0.1, 0.2, 0.3])
    plan = COPIES[way](dataclasses.replace(own_plan(), sampling_rates=rates))
    epsilon[:], record_owner[:], rates[:] = 99, 0, 1
    assert owners.epsilon.tolist() == [1, 2]
    assert owners.record_owner_index.tolist() == [0, 1, 1]
    assert plan.sampling_rates.tolist() == [0.1, 0.2, 0.3]


def test_a_change_after_the_step_is_built_does_not_reach_it():
    plan = own_plan()
    noise_std, clip_norms = plan.noise_std, plan.clip_norms
    step, batches = step_of(plan), ow.PoissonBatches(DATA, plan)
    changed(plan, noise_std=1e-6, clip_norms=100 * clip_norms, sampling_rates=np.ones(3))
    for batch in batches:
        step(batch)
    assert step.private
    assert step.plan.noise_std == noise_std
    np.testing.assert_array_equal(step.plan.clip_norms, clip_norms)
    with pytest.raises(ow.PlanError):
        ow.PoissonBatches(DATA, plan)


def test_a_cached_hash_or_epsilon_never_vouches_for_a_copy():
    plan = own_plan()
    plan.epsilon()
    honest = plan.hash
    weaker = changed(plan, noise_std=plan.noise_std / 10)
    assert weaker.hash == honest  # as it was cached
    for name in ("copy", "deepcopy", "pickle", "replace"):
        assert COPIES[name](weaker).hash != honest
        assert COPIES[name](weaker).epsilon()[0] > 2


def test_a_plan_that_was_made_here_is_not_verified_again(monkeypatch):
    plan = own_plan()
    calls = []
    verify = verification.verify
    monkeypatch.setattr(
        verification, "verify", lambda *given: calls.append(given) or verify(*given)
    )
    step_of(plan)
    step_of(pickle.loads(pickle.dumps(plan)))
    assert calls == []
    safer = dataclasses.replace(plan, noise_std=plan.noise_std * 1.5)
    assert step_of(safer).plan == safer
    step_of(safer)
    assert len(calls) == 1


def test_a_check_at_fewer_budgets_does_not_count_as_verified():
    safer = dataclasses.replace(own_plan(), noise_std=own_plan().noise_std * 1.7)
    safer.verify(points=2)
    assert not verification.is_verified(safer)
    safer.verify()
    assert verification.is_verified(safer)


def drawn() -> ow.Batch:
    return next(iter(ow.PoissonBatches(DATA, tools.make_plan())))


BY_HAND = {
    "fields": lambda b: ow.Batch(0, b.indices, b.owner_index, b.data, b.plan_hash),
    "replaced rows": lambda b: dataclasses.replace(b, data=b.data),
    "replaced indices": lambda b: dataclasses.replace(b, indices=b.indices),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": lambda b: pickle.loads(pickle.dumps(b)),
}


@pytest.mark.parametrize("way", BY_HAND)
def test_only_poisson_batches_makes_a_private_batch(way):
    plan = tools.make_plan()
    step = step_of(plan)
    step(drawn())
    assert step.private
    step = step_of(plan)
    step(BY_HAND[way](drawn()))
    assert not step.private
    assert "NOT PRIVATE" in repr(step)


def test_the_mark_of_a_private_batch_cannot_be_given():
    batch = drawn()
    given = (0, batch.indices, batch.owner_index, batch.data, batch.plan_hash)
    with pytest.raises(TypeError):
        ow.Batch(*given, private=True)
    with pytest.raises(TypeError):
        ow.Batch(*given, None, True)
    with pytest.raises(ValueError, match="private"):
        dataclasses.replace(batch, private=True)
    with pytest.raises(ValueError, match="read-only"):
        batch.owner_index[:] = 2  # a longer clip norm


def test_batches_of_another_plan_are_refused_and_another_stream_is_fine():
    plan = own_plan()
    other = dataclasses.replace(plan, noise_std=plan.noise_std * 2)
    with pytest.raises(ow.PlanError, match="drawn with plan"):
        step_of(plan)(next(iter(ow.PoissonBatches(DATA, other))))
    step = ow.PrivateStep(
        model := nn.Linear(4, 3), plan, torch.optim.SGD(model.parameters(), lr=0.1),
        functional.cross_entropy, stream=ow.SecretStream(),
    )  # fmt: skip
    for batch in ow.PoissonBatches(DATA, copy.deepcopy(plan), stream=ow.SecretStream()):
        step(batch)
    assert step.private


# numbers, schedules and plans of derived classes, which do not compute as they are written


class _QuietSchedule(Schedule):
    def factor_at(self, step):
        return 1e-9


class _QuietNumber(float):
    def __mul__(self, other):
        return 1e-9


class _QuietPlan(ow.Plan):
    def verified(self):
        return self

    def noise_std_at(self, step):
        return 1e-9


DERIVED = {
    "schedule": lambda p: dataclasses.replace(p, schedule=_QuietSchedule(p.schedule.segments)),
    "number": lambda p: dataclasses.replace(p, noise_std=_QuietNumber(p.noise_std)),
    "plan": lambda p: _QuietPlan(**p.__getstate__()),
}


@pytest.mark.parametrize("derived", DERIVED)
def test_what_a_derived_class_computes_does_not_reach_the_step(derived):
    plan = own_plan()
    step = step_of(DERIVED[derived](plan))
    assert type(step.plan) is ow.Plan
    assert step.plan.noise_std_at(0) == plan.noise_std_at(0)
    assert step.plan.hash == plan.hash
    batch = next(iter(ow.PoissonBatches(DATA, DERIVED[derived](plan))))
    assert batch.plan_hash == plan.hash


def test_a_schedule_that_changes_after_the_step_is_built_does_not_reach_it():
    plan = own_plan()
    step = step_of(plan)
    before = step.plan.noise_std_at(0)
    object.__setattr__(plan.schedule, "segments", ((plan.steps, 1e-9),))
    assert step.plan.noise_std_at(0) == before
