"""Audits by several processes: the result of one, and bugs that show in several processes only."""

import warnings
from functools import partial

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import ownerwise as ow
from ownerwise.audit import load_audits
from ownerwise.audit.canaries import Canaries
from ownerwise.audit.observation import Training, observe
from tools import groups
from tools.planted_bugs import BUGS_OF_PROCESSES as BUGS

PEOPLE, SEED = 240, 4

PLANS = {
    "plain": {"method": "both"},
    "hardened": {"hardened": True},
    "releasing": {"release_std": 20.0},
    "owners": {"unit": "owner"},
    "owners, records": {"unit": "owner", "sampling": "record"},
}
ALONE = {
    "plain": ("plain", {}),
    "INO": ("plain", {"weights": ow.INO()}),
    "hardened": ("hardened", {"weights": ow.INO()}),
    "importance": ("releasing", {"clipping": ow.ImportanceSampling(accepted_batch=30)}),
    "owners": ("owners", {"weights": ow.INO()}),
    "owners, records": ("owners, records", {}),
}
ATTACKS = ("white-box", "loss", "loss difference")


def stream(seed=SEED):
    return ow.SecretStream.from_seed(seed)


def planned(**options):
    names = np.arange(PEOPLE)
    each = 3 if options.get("unit") == "owner" else 1
    budgets = {int(name): (1.0, 8.0)[name % 2] for name in names}
    owners = ow.Owners(np.repeat(names, each), budgets, 1e-5)
    return ow.plan(owners, **{"steps": 5, "batch_size": PEOPLE / 3, **options})


def partition():
    return ow.Partition({"side": ("left", "right")}, classes=3)


def fair():
    return ow.RateConstraints(ow.constraints.demographic_parity(partition(), "side", max_gap=0.1))


def data(seed=0):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(PEOPLE, 6, generator=generator)
    return inputs, torch.arange(PEOPLE) % 3


def watched(plan, options):
    """What canaries that train alone show."""
    ordered = "weights" in options
    canaries = Canaries.of(plan, 80, stream(), alone=True, ordered=ordered)
    return observe(canaries, Training(**options), stream())


def seen_by(plans):
    found = {}
    for name, (kind, options) in ALONE.items():
        seen = watched(plans[kind], options)
        found[name] = seen.sums, seen.drawn, seen.expected, seen.canaries.included
    return found


def audits(plans):
    """Audits of canaries alone, and of a model that each process has initialised by itself."""
    options = {"canaries": 80, "stream": stream()}
    found = [ow.audit.one_run(None, plans["plain"], weights=ow.INO(), **options)]
    torch.manual_seed(SEED)
    model = nn.Linear(6, 3)
    if dist.is_initialized() and dist.get_rank():
        nn.init.zeros_(model.weight)
    for attack in ATTACKS:
        found.append(ow.audit.one_run(model, plans["plain"], data(), attack=attack, **options))
    sides = np.where(np.arange(PEOPLE) % 2, "left", "right")
    inputs, classes = data()
    targets = partition().targets(classes.numpy(), {"side": sides})
    found.append(
        ow.audit.one_run(model, plans["fair"], (inputs, targets), release=fair(), **options)
    )
    return found


def of_group(plans, folder):
    found = audits(plans)
    saved = found[0].save(folder)
    dist.barrier()
    private = ow.audit.one_run(None, plans["plain"], canaries=40)  # a key from the system
    return seen_by(plans), found, load_audits(saved.parent), private


def unlike(plan):
    rank = dist.get_rank()
    inputs, targets = data()
    model, records = nn.Linear(6, 3), torch.zeros(40, 6)

    def one_run(model=model, given=(inputs, targets), plan=plan, **options):
        options = {"canaries": 40, "stream": stream(), **options}
        with pytest.raises(ow.OwnerwiseError) as error:
            ow.audit.one_run(model, plan, given, **options)
        return str(error.value)

    def others(**options):
        with pytest.raises(ow.OwnerwiseError) as error:
            ow.audit.conformance(plan, canaries=40 + 2 * rank, **options)
        return str(error.value)

    classes = torch.zeros(40, dtype=torch.int64)
    return {
        "data": one_run(given=data(rank)),
        "one record": one_run(given=(inputs, targets.index_fill(0, torch.tensor([7]), rank))),
        "plan": one_run(plan=planned(steps=4 + rank)),
        "seeds": one_run(stream=stream(rank)),
        "one seed": one_run(stream=stream() if rank else ow.SecretStream()),
        "canaries": one_run(canaries=40 + 2 * rank),
        "compared": others(),
        "attack": one_run(attack=ATTACKS[rank]),
        "wrong in one": one_run(attack=("LiRA", "loss")[rank]),
        "guesses": one_run(guesses=0.1 + 0.1 * rank),
        "failure": one_run(failure=0.1 + 0.1 * rank),
        "records": one_run(attack="loss", canary_records=(records + rank, classes)),
        "no model": one_run(*((None, None) if rank else (model, (inputs, targets)))),
        "weights": one_run(weights=ow.INO() if rank else None),
        "optimizer": one_run(optimizer=(torch.optim.SGD, torch.optim.Adam)[rank]),
    }


def sharded(plan):
    """The user's own wrapper, and an optimizer that exchanges parameters."""
    with warnings.catch_warnings(action="ignore"):  # torch's own
        from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    options = {"canaries": 40}
    plain = ow.audit.one_run(model, plan, data(), stream=stream(), **options)
    with pytest.warns(UserWarning, match="taken out of its DistributedDataParallel"):
        wrapped = ow.audit.one_run(
            DistributedDataParallel(model), plan, data(), stream=stream(), **options
        )
    with pytest.raises(ow.OwnerwiseError, match="ZeroRedundancyOptimizer sends parameters"):
        ow.audit.one_run(
            model, plan, data(), stream=stream(), **options,
            optimizer=lambda p: ZeroRedundancyOptimizer(p, torch.optim.SGD, lr=0.1),
        )  # fmt: skip
    return plain, wrapped


class Uncopied(nn.Linear):
    def __deepcopy__(self, memo):
        if dist.get_rank():
            raise ValueError("no copies")
        return nn.Linear(6, 3)


class Unweighted(ow.INO):
    def weights(self, *arguments):
        if dist.get_rank():
            raise ValueError("no weights")
        return super().weights(*arguments)


def without_gradients(outputs, targets, scale):
    """A loss that is the same in all processes in training."""
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return losses if torch.is_grad_enabled() else scale(losses, dist.get_rank())


def broken(losses, rank):
    if rank:
        raise ValueError("no loss")
    return losses


def no_optimizer(parameters):
    if dist.get_rank():
        raise ValueError("no optimizer")
    return torch.optim.SGD(parameters, lr=0.1)


def failing(plan):
    """Errors in the second process alone, in one audit after another; no process may wait."""
    model = nn.Linear(6, 3)
    options = {"canaries": 40, "stream": stream()}

    def one_run(model=model, **changes):
        return ow.audit.one_run(model, plan, data(), **options, **changes)

    def losses(scale):
        return one_run(loss=partial(without_gradients, scale=scale), attack="loss")

    found = {}
    for name, audit in {
        "no plan": lambda: ow.audit.conformance("plan" if dist.get_rank() else plan, **options),
        "no copies": lambda: one_run(Uncopied(6, 3)),
        "no optimizer": lambda: one_run(optimizer=no_optimizer),
        "no weights": lambda: ow.audit.conformance(plan, weights=Unweighted(), **options),
        "no loss": lambda: losses(broken),
        "unlike losses": lambda: losses(lambda losses, rank: losses + rank),
    }.items():
        with pytest.raises((ow.OwnerwiseError, ValueError, AttributeError)) as error:
            audit()
        found[name] = str(error.value)
    return found


def compared(plan, bug, **options):
    """What a comparison with the plan finds, with a planted bug."""
    with pytest.MonkeyPatch.context() as patches:
        bug(patches)
        return ow.audit.conformance(plan, canaries=200, stream=stream(), **options)


def all_compared(plan):
    right = compared(plan, lambda patches: None, weights=ow.INO())
    found = {bug.__name__: compared(plan, bug, **of_step) for bug, of_step in BUGS.items()}
    return right, found


def everything(plans, folder):
    plan = plans["plain"]
    failures = failing(plan)  # first: whatever follows must still work
    return of_group(plans, folder), unlike(plan), sharded(plan), all_compared(plan), failures


@pytest.fixture(scope="module")
def plans():
    found = {name: planned(**options) for name, options in PLANS.items()}
    return {**found, "fair": planned(constraints=fair())}


@pytest.fixture(scope="module")
def of_two(plans, tmp_path_factory):
    return groups.in_group(everything, 2, plans, tmp_path_factory.mktemp("two"))


def same(found, plans):
    """All processes have the same bits, and those of one process but for rounding."""
    alone = seen_by(plans)
    for name, expected in alone.items():
        sums, drawn, added, included = found[0][name]
        for other in found[1:]:
            for one, two in zip(found[0][name], other[name], strict=True):
                np.testing.assert_array_equal(one, two)
        np.testing.assert_array_equal(drawn, expected[1])
        np.testing.assert_array_equal(included, expected[3])
        assert drawn.sum() > 50
        np.testing.assert_allclose(added, expected[2], rtol=1e-3)  # more processes, more slack
        np.testing.assert_allclose(sums, expected[0], rtol=1e-3, atol=2e-3)


def equal_audits(found, expected):
    for one, alone in zip(found, expected, strict=True):
        assert (one.title, one.compared, one.alarms) == (alone.title, alone.compared, ())
        for group, of_one in zip(one.groups, alone.groups, strict=True):
            assert group.name == of_one.name
            assert group.bounds == of_one.bounds
            assert (group.guesses, group.right) == (of_one.guesses, of_one.right)
            assert group.auc == pytest.approx(of_one.auc, abs=2e-3)
            assert group.estimate == pytest.approx(of_one.estimate, abs=0.02)


def test_two_processes_audit_what_one_does(of_two, plans):
    (first, *_), (second, *_) = of_two
    same([first[0], second[0]], plans)
    assert first[1] == second[1]
    equal_audits(first[1], audits(plans))
    assert first[2] == second[2] == [first[1][0]]  # the first process has written it
    assert first[3] == second[3]
    assert first[3].passed


def test_processes_that_audit_different_things_are_refused(of_two):
    first, second = (one[1] for one in of_two)
    assert first == second
    for name, what in {
        "data": "the data", "one record": "the data", "plan": "the plan", "canaries": "canaries",
        "compared": "canaries", "attack": "attack", "guesses": "guesses", "failure": "failure",
        "records": "canary_records", "no model": "model", "weights": "the mechanisms",
        "optimizer": "the optimizer",
    }.items():  # fmt: skip
        assert f"processes differ in {what}" in first[name], name
    for name in ("seeds", "one seed"):
        assert "streams with different seeds" in first[name]
    assert "attack is 'LiRA'" in first["wrong in one"]


def test_an_error_in_one_process_is_raised_in_all(of_two):
    first, second = (
        {name: text for name, text in one[4].items() if name != "unlike losses"} for one in of_two
    )
    for name, text in first.items():
        assert "process 1 stopped with a" in text, name
    assert "'str' object" in second.pop("no plan")
    for name, text in second.items():
        assert text == name


def test_canaries_with_other_losses_in_one_process_are_refused(of_two):
    """The attacker's scores, and with them the result, would differ between processes."""
    for one in of_two:
        assert "processes differ in the losses of the canaries" in one[4]["unlike losses"]


def test_wrappers_are_taken_off_or_refused(of_two):
    for plain, wrapped in (one[2] for one in of_two):
        assert plain == wrapped


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.__name__)
def test_a_bug_of_several_processes_is_caught(bug, of_two):
    """The five bugs do not show in one process, in which the product's tests would pass."""
    (right, found), (also_right, also_found) = (one[3] for one in of_two)
    assert right.passed, right.describe()
    assert right.checks == also_right.checks
    assert not found[bug.__name__].passed
    assert found[bug.__name__].alarms == also_found[bug.__name__].alarms


def test_in_one_process_these_bugs_do_not_show(plans):
    found = [compared(plans["plain"], bug, **of_step) for bug, of_step in BUGS.items()]
    assert all(result.passed for result in found)


@pytest.mark.long
@pytest.mark.parametrize("count", [3, 4])
def test_more_processes_audit_what_one_does(count, plans, tmp_path):
    found = groups.in_group(of_group, count, plans, tmp_path)
    same([one[0] for one in found], plans)
    assert all(one[1:] == found[0][1:] for one in found)
    equal_audits(found[0][1], audits(plans))
