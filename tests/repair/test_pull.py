"""The pull adjustment: its shift, the step with it, what it refuses, and counts in files."""

from __future__ import annotations

import copy
import math
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

import ownerwise as ow
from ownerwise.repair import REPAIRS, as_repair, shifted
from ownerwise.repair.counts import read_counts
from ownerwise.step.loss_separation import LossCheck
from tools import step_tools as tools

cross_entropy = functional.cross_entropy
COUNTS = np.array([[30, 6, 4], [8, 25, 12], [5, 10, 40]])

pytestmark = pytest.mark.filterwarnings("ignore:PullAdjustment.*clip norms")

_double = pytest.fixture(autouse=True)(tools.double_on_one_thread)


def slow_shift(plan, counts, tau, aim):
    """The shift, one number at a time, from its definition."""
    owners, classes = len(counts), len(counts[0])
    pulls, shares = [], []
    for c in range(classes):
        pull = share = 0.0
        for o in range(owners):
            pull += float(plan.sampling_rates[o]) * float(plan.clip_norms[o]) * float(counts[o][c])
            share += float(counts[o][c])
        pulls.append(pull)
        shares.append(share)
    result = []
    for c in range(classes):
        value = math.log(pulls[c] / sum(pulls))
        if aim == "natural":
            value -= math.log(shares[c] / sum(shares))
        result.append(tau * value)
    return result


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 6),
    st.integers(0, 10**6),
    st.floats(0, 4),
    st.sampled_from(["natural", "balanced"]),
    st.sampled_from(["sample", "scale", "uniform"]),
)
def test_the_shift_is_that_of_the_definition(classes, seed, tau, aim, method):
    plan = tools.make_plan(method=method)
    counts = np.random.default_rng(seed).integers(1, 500, (3, classes)) + 10
    found = ow.PullAdjustment(tau, counts, aim).shift(plan)
    np.testing.assert_allclose(found, slow_shift(plan, counts, tau, aim), rtol=1e-12, atol=1e-12)


def test_counts_per_budget_give_the_shift_of_counts_per_owner():
    """Six owners, of whom pairs have the same epsilon, in another order than their ids."""
    epsilon = {"a": 8.0, "b": 1.0, "c": 2.0, "d": 1.0, "e": 8.0, "f": 2.0}
    owners = ow.Owners(np.repeat(list(epsilon), 50), epsilon, 1e-5)
    plan = ow.plan(owners, steps=5, batch_size=20)
    counts = np.random.default_rng(0).integers(5, 40, (6, 3))
    rows = np.array([counts[[1, 3]].sum(0), counts[[2, 5]].sum(0), counts[[0, 4]].sum(0)])
    each = ow.PullAdjustment(counts=counts).shift(plan)
    merged = ow.PullAdjustment(counts=rows, per="budget").shift(plan)
    np.testing.assert_allclose(merged, each, rtol=1e-12)


def test_budgets_with_other_deltas_count_by_their_declared_records():
    owners = ow.Owners(np.repeat([0, 1], [30, 90]), {0: 1.0, 1: 1.0}, {0: 1e-5, 1: 1e-7})
    plan = ow.plan(owners, steps=5, batch_size=20)
    other = ow.Owners(np.arange(2).repeat(60), {0: 1.0, 1: 4.0}, 1e-5)
    wide = ow.plan(other, steps=5, batch_size=20)
    assert len(np.unique(plan.sampling_rates)) == 2
    found = ow.PullAdjustment(counts=[[30, 40]], per="budget", aim="balanced").shift(plan)
    expected = np.log([30 / 70, 40 / 70])  # one row: its weight cancels
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    with pytest.raises(ow.OwnerwiseError, match="1 rows; expected one for each of the 2 epsilons"):
        ow.PullAdjustment(counts=[[30, 40]], per="budget").shift(wide)


def test_the_shift_is_the_same_for_all_neighbouring_data_sets():
    """It depends on the plan and on declared counts: every record removed in turn."""
    ids, declared = np.arange(tools.RECORDS) % 3, {0: 20, 1: 20, 2: 20}
    labels = np.random.default_rng(0).integers(0, 3, tools.RECORDS)

    def shift_without(removed):
        kept = np.delete(np.arange(tools.RECORDS), removed)
        owners = ow.Owners(ids[kept], {0: 1.0, 1: 2.0, 2: 4.0}, records=declared)
        plan = ow.plan(owners, steps=6, batch_size=12)
        repair = ow.PullAdjustment(counts=COUNTS)
        repair.warn_if_counted(plan, labels[kept])
        return repair.shift(plan).tolist(), repair.record(plan)

    whole = shift_without([])
    assert all(shift_without(out) == whole for out in range(tools.RECORDS))


@pytest.mark.parametrize("kind", ["mlp", "cnn", "text", "transformer"])
@pytest.mark.parametrize("size", [None, 2])
def test_a_step_is_that_of_the_loop_with_shifted_outputs(kind, size):
    model, inputs, labels = tools.example(kind)
    plan, batch = tools.make_plan(), tools.batch_of(inputs, labels)
    repair = ow.PullAdjustment(tau=1.7, counts=COUNTS)
    added = torch.tensor(slow_shift(plan, COUNTS, 1.7, "natural"))
    plain = copy.deepcopy(model)
    performance = ow.Performance(micro_batch_size=size)
    step = tools.make_step(model, cross_entropy, repair=repair, performance=performance)
    sums = tools.loop_over_records(
        plain, lambda outputs, targets: cross_entropy(outputs + added, targets), batch, step
    )
    torch.testing.assert_close(
        tools.flat(step.clipped_sum(batch)), tools.flat(dict(enumerate(sums))), rtol=0, atol=1e-9
    )


def test_a_single_logit_gets_the_difference():
    counts, plan = np.array([[30, 5], [10, 20], [6, 50]]), tools.make_plan()
    shift = ow.PullAdjustment(counts=counts).shift(plan)
    for outputs in (torch.zeros(4), torch.zeros(4, 1)):
        expected = (shift[1] - shift[0]).expand_as(outputs)
        assert torch.allclose(shifted(outputs, shift), expected)
    two = shifted(torch.zeros(4, 2), shift).softmax(dim=1)[:, 1]
    assert torch.allclose(two, torch.sigmoid(shifted(torch.zeros(4), shift)))


def test_torch_losses_are_still_known_to_treat_records_separately(monkeypatch):
    """The shift comes before the loss, so that no step checks a loss that needs no check."""

    def refuse(*arguments, **options):
        raise AssertionError("checked")

    monkeypatch.setattr(LossCheck, "__init__", refuse)
    model, inputs, labels = tools.example("mlp")
    repair = ow.PullAdjustment(counts=COUNTS)
    for loss in (cross_entropy, torch.nn.CrossEntropyLoss()):
        tools.make_step(model, loss, repair=repair)(tools.batch_of(inputs, labels))

    def own(outputs, targets):
        return cross_entropy(outputs, targets, reduction="none")

    step = tools.make_step(model, own, repair=repair)
    with pytest.raises(AssertionError, match="checked"):
        step(tools.batch_of(inputs, labels))


def test_a_loss_that_mixes_records_is_refused_with_a_repair_too():
    def mixing(outputs, targets):
        return cross_entropy(outputs - outputs.mean(dim=0), targets, reduction="none")

    model, inputs, labels = tools.example("mlp")
    step = tools.make_step(model, mixing, repair=ow.PullAdjustment(counts=COUNTS))
    with pytest.raises(ow.OwnerwiseError, match="loss of a record changes"):
        step(tools.batch_of(inputs, labels))


def test_all_bad_settings_are_named():
    with pytest.raises(ow.OwnerwiseError) as error:
        ow.PullAdjustment(tau=-1, counts=[[1, "x"]], aim="fair", per="class", least_records=1)
    named = [problem.split()[1] for problem in error.value.problems]
    assert named == ["tau", "aim", "per", "least_records", "counts"]
    for counts in (None, [1, 2], [[1, math.nan]], [[-1, 30]]):
        with pytest.raises(ow.OwnerwiseError, match="public label counts"):
            ow.PullAdjustment(counts=counts)


def test_counts_that_would_reveal_labels_are_refused():
    """Pitfall 61: for an owner with one record, the counts are the label."""
    with pytest.raises(ow.OwnerwiseError, match=r'2 owners have fewer than 10 .*per="budget"'):
        ow.PullAdjustment(counts=[[1, 0], [3, 4], [30, 20]])
    with pytest.raises(ow.OwnerwiseError, match="a class has no records"):
        ow.PullAdjustment(counts=[[40, 0], [30, 0]])
    with pytest.raises(ow.OwnerwiseError, match="1 columns; expected one per class"):
        ow.PullAdjustment(counts=[[40], [30]])


def test_counts_cannot_be_changed_afterwards():
    counts = COUNTS.astype(float)
    repair = ow.PullAdjustment(counts=counts)
    before = repair.settings()
    counts[:] = 99
    assert repair.settings() == before
    with pytest.raises(ValueError, match="read-only"):
        repair.counts[0, 0] = 1


def test_what_does_not_fit_is_refused_with_all_reasons():
    model, _, _ = tools.example("mlp")
    plan = tools.make_plan(release_std=4.0)
    repair = ow.PullAdjustment(counts=COUNTS[:2])
    with pytest.raises(ow.OwnerwiseError) as error:
        tools.make_step(
            model, cross_entropy, plan=plan, repair=repair, weights=ow.INO(),
            release=tools.CountClasses(),
        )  # fmt: skip
    rows, weights, release = error.value.problems
    assert "2 rows; expected one for each of the 3 owners" in rows
    assert "PullAdjustment with INO: how hard a class pulls" in weights
    assert "PullAdjustment with CountClasses" in release
    with pytest.raises(ow.OwnerwiseError, match=r"repair='pull': .*\.repair\.PullAdjustment"):
        tools.make_step(model, cross_entropy, repair="pull")
    calibrated = tools.make_plan(calibration=ow.Calibration())
    with pytest.raises(ow.OwnerwiseError, match="natural class shares"):
        ow.PullAdjustment(counts=COUNTS, aim="balanced").shift(calibrated)


@pytest.mark.parametrize("outputs", [torch.zeros(4, 2), torch.zeros(4), torch.zeros(4, 3, 5), {}])
def test_outputs_that_are_not_those_of_the_classes_are_refused(outputs):
    shift = ow.PullAdjustment(counts=COUNTS).shift(tools.make_plan())
    with pytest.raises(ow.OwnerwiseError, match="each of the 3 classes of the repair"):
        shifted(outputs, shift)


def test_a_checkpoint_belongs_to_its_repair(tmp_path):
    """In your own loop too: another tau, other counts, or none."""
    model, inputs, labels = tools.example("mlp")
    repair = ow.PullAdjustment(counts=COUNTS)
    step = tools.make_step(copy.deepcopy(model), cross_entropy, repair=repair)
    step(tools.batch_of(inputs, labels))
    step.save(tmp_path)
    others = (
        (ow.PullAdjustment(tau=2.0, counts=COUNTS), "has tau = 1.0, but this step has 2.0"),
        (ow.PullAdjustment(counts=COUNTS + 1), "has counts = "),
        (None, "contains the state of repair, but this step has none"),
    )
    for other, message in others:
        with pytest.raises(ow.OwnerwiseError, match=message):
            tools.make_step(copy.deepcopy(model), cross_entropy, repair=other).restore(tmp_path)
    again = tools.make_step(model, cross_entropy, repair=ow.PullAdjustment(counts=COUNTS))
    again.restore(tmp_path)
    assert again.steps_spent == 1


def test_counted_labels_are_warned_of_for_owners_and_for_budgets():
    """Pitfall 61: counts that were "declared" but counted on the training labels."""
    plan, labels = tools.make_plan(), np.arange(tools.RECORDS) // 3 % 2
    index = plan.owners.record_owner_index
    counts = np.zeros((3, 2))
    np.add.at(counts, (index, labels), 1)
    for per in ("owner", "budget"):
        repair = ow.PullAdjustment(counts=counts, per=per)
        for form in (labels, torch.tensor(labels), torch.tensor(labels)[:, None].float()):
            with pytest.warns(ow.PrivacyWarning, match="NOT private"):
                repair.warn_if_counted(plan, form)
    ow.PullAdjustment(counts=counts + 1).warn_if_counted(plan, labels)


class TestCountsInFiles:
    OWNERS = ("ann", "bob", "eve")
    CLASSES = ("well", "ill")

    def plan(self, ids=OWNERS):
        owners = ow.Owners(np.repeat(ids, 40), dict(zip(ids, (4.0, 1.0, 2.0), strict=True)), 1e-5)
        return ow.plan(owners, steps=3, batch_size=20)

    def read(self, folder, text, plan):
        (folder / "counts.csv").write_text(text)
        return read_counts(folder / "counts.csv", self.CLASSES, plan)

    def test_rows_and_columns_in_any_order(self, tmp_path):
        plan = self.plan()
        text = "owner,ill,well\neve,1,39\nann,20,21\nbob,30,12\n"
        counts, per = self.read(tmp_path, text, plan)
        assert counts.tolist() == [[21, 20], [12, 30], [39, 1]]
        assert per == "owner"
        text = "epsilon,well,ill\n4,21,20\n1.0,12,30\n2,39,1\n"
        counts, per = self.read(tmp_path, text, plan)
        assert counts.tolist() == [[12, 30], [39, 1], [21, 20]]
        assert per == "budget"

    @pytest.mark.parametrize("ids", [(3, 10, 200), ("3", "10", "200"), ("007", "08", "x")])
    def test_a_plan_without_owners_knows_their_ids_by_hash(self, tmp_path, ids):
        plan = self.plan(sorted(ids))
        plan.save(tmp_path / "plan.json")
        stored = ow.Plan.load(tmp_path / "plan.json")
        lines = [f"{owner},{20 + at},{at}" for at, owner in enumerate(ids)]
        text = "owner,well,ill\n" + "\n".join(lines) + "\n"
        found = self.read(tmp_path, text, stored)[0]
        assert found.tolist() == self.read(tmp_path, text, plan)[0].tolist()
        order = [list(ids).index(owner) for owner in plan.owners.ids.tolist()]
        assert found[:, 1].tolist() == order
        with pytest.raises(ow.OwnerwiseError, match="owners are not those of the run"):
            self.read(tmp_path, text.replace(str(ids[0]), "77"), stored)

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "is empty"),
            ("owner,well,ill\n", "no rows"),
            ("name,well,sick\nann,1,2\n", "3 problems"),
            ("owner,well,ill\nann,1\n", "line 2: expected 3 cells"),
            ("owner,well,ill\nann,1,x\nbob,2,-3\n", "line 2, 3: expected counts of at least 0"),
            ("owner,well,ill\nann,10,3\nann,9,9\nbob,2,3\n", "owners are not those"),
            ("epsilon,well,ill\n1,10,3\n2,9,9\n", "expected one row for each of 1, 2, 4"),
            ("epsilon,well,ill\none,10,3\n", "epsilons are not those"),
            # Python reads "1_0" as 10, and other scripts' digits
            ("owner,well,ill\nann,1_0,3\nbob,٣0,3\neve,9,9\n", "line 2, 3: expected counts"),
            ("epsilon,well,ill\n1,9,3\n2,9,9\n0_4,9,9\n", "epsilons are not those"),
        ],
    )
    def test_problems_are_named(self, tmp_path, text, message):
        with pytest.raises(ow.OwnerwiseError, match=message):
            self.read(tmp_path, text, self.plan())

    def test_a_missing_file(self, tmp_path):
        with pytest.raises(ow.OwnerwiseError, match=r"no file .*nowhere\.csv"):
            read_counts(tmp_path / "nowhere.csv", self.CLASSES, self.plan())


def test_a_repair_by_name():
    repair = as_repair({"tau": 0.5, "counts": COUNTS, "aim": "balanced"})
    assert (repair.tau, repair.aim) == (0.5, "balanced")
    assert as_repair(None) is None
    assert as_repair(repair) is repair
    assert list(REPAIRS) == ["pull"]
    with pytest.raises(ow.OwnerwiseError, match="did you mean 'tau'"):
        as_repair({"tauu": 0.5, "counts": COUNTS})


def test_differing_clip_norms_are_warned_of():
    """With method scale and no clipping, tau = 1 would reverse the harm."""
    owners = ow.Owners(np.repeat([0, 1, 2], 40), np.array([1.0, 2.0, 4.0]), delta=1e-5)
    for method, warns in (("sample", False), ("scale", True), ("both", True)):
        plan = ow.plan(owners, method, steps=3, batch_size=12)
        for tau in (0.0, 1.0):
            model = torch.nn.Linear(2, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            repair = ow.PullAdjustment(tau=tau, counts=COUNTS)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                ow.PrivateStep(model, plan, optimizer, cross_entropy, repair=repair)
            told = any("the opposite tilt" in str(each.message) for each in caught)
            assert told == (warns and tau > 0)
