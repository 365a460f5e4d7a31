"""A private search leaves nothing but one run: no count, no log, no trace; and it is charged."""

import html
import importlib
import json
import warnings
from collections import Counter
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.accounting import RunLaw
from ownerwise.processes import Processes
from ownerwise.report import card_text, tuning_line
from ownerwise.tuning import trials
from ownerwise.tuning.scores import contribution_sum

torch.manual_seed(0)
X = torch.randn(600, 3)
y = (X[:, 0] > X[:, 1]).long()
IDS = np.arange(600) % 30
BUDGETS = {at: (2.0, 4.0)[at % 2] for at in range(30)}
OWNERS = ow.Owners(IDS, BUDGETS)
PUBLIC = ow.PublicScore((torch.randn(200, 3), torch.randint(0, 2, (200,))))
SPACE = {"lr": [0.1, 1.0], "clip_norm": [0.5, 1.0]}
COMMON = {"model": lambda: nn.Linear(3, 2), "steps": 8, "batch_size": 200, "runs": 3}


def tune(**changes):
    return ow.tune(SPACE, OWNERS, (X, y), **{"score": PUBLIC, **COMMON, **changes})


pytestmark = pytest.mark.filterwarnings("ignore:this process has already trained")


@pytest.fixture
def made(monkeypatch):
    """Return the list of runs that searches make; each has its settings and score."""
    made = []
    original = trials._Trial.make

    def make(self):
        original(self)
        made.append((self._choice, self.score))

    monkeypatch.setattr(trials._Trial, "make", make)
    return made


def test_the_best_run_is_released_with_its_settings(made, tmp_path):
    run = tune(seed=3, folder=tmp_path / "run", runs=6)
    assert len(made) > 1
    choice, best = max(made, key=lambda one: one[1])
    candidates = run.config["tuning"]["candidates"]
    assert run.config["tuning"]["settings"] == candidates[choice]
    assert run.config["optimizer"]["lr"] == candidates[choice]["lr"]
    assert run.plan.clip_norm == candidates[choice]["clip_norm"]
    assert PUBLIC(run.model) == best
    loaded = ow.Run.load(tmp_path / "run", nn.Linear(3, 2))
    assert torch.equal(loaded.model.weight, run.model.weight)
    assert loaded.steps_spent == run.plan.steps
    assert np.array_equal(loaded.epsilon(), run.plan.epsilon())
    assert (loaded.epsilon() <= OWNERS.epsilon).all()


def test_neither_number_nor_log_of_runs_leaves(made, tmp_path, capfd):
    """Trap 50. Searches with different numbers of runs leave the same kinds of things."""
    seen, prepared = [], _prepared(fit_options={"test": (X[:50], y[:50])})
    capfd.readouterr()
    for at in range(40):
        made.clear()
        before = torch.random.get_rng_state()
        folder = tmp_path / str(at)
        given = _with(prepared, folder=folder, stream=ow.SecretStream())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            run = trials.search(given)
        assert torch.equal(torch.random.get_rng_state(), before)
        files = sorted(p.name for p in folder.iterdir())
        size = (folder / "account.db").stat().st_size
        keys = sorted(set(run.config) - {"earlier_trainings"})
        seen.append((len(made), [len(caught) - bool(at), files, size, keys, len(run.history)]))
        if len({count for count, _ in seen}) > 3:
            break
    assert len({json.dumps(left) for _, left in seen}) == 1
    assert "".join(capfd.readouterr()) == ""
    assert run.history[-1]["seconds"] == 0


def test_the_number_of_runs_follows_the_law_and_candidates_are_independent(monkeypatch):
    """20 false alarms in a million: 4.1 standard deviations, with fixed seeds."""
    drawn, choices = Counter(), []

    def make(self):
        choices.append(self._choice)
        self.score, self.trainer = 0.0, object()

    monkeypatch.setattr(trials._Trial, "make", make)
    monkeypatch.setattr(trials, "_released", lambda given, best, earlier: None)
    monkeypatch.setattr(trials, "note_training", lambda plan: 0)
    given = _prepared()
    plan, count = given.plans[0], 3000
    for at in range(count):
        choices.clear()
        trials.search(_with(given, stream=ow.SecretStream.from_seed(at)))
        drawn[len(choices)] += 1
    chances = plan.tuning.law.probabilities(12)
    for number in range(1, 8):
        sd = (chances[number] * (1 - chances[number]) / count) ** 0.5
        assert abs(drawn[number] / count - chances[number]) < 4.3 * sd
    picks = []
    for at in range(count):
        choices.clear()
        trials.search(_with(given, stream=ow.SecretStream.from_seed(at)))
        picks += choices
    shares = np.bincount(picks, minlength=4) / len(picks)
    assert np.abs(shares - 0.25).max() < 4.3 * (0.25 * 0.75 / len(picks)) ** 0.5


def _prepared(law="geometric", fit_options=None, **options):
    from ownerwise.tuning import prepare_search
    from ownerwise.tuning.search import make_candidate

    candidates = [
        make_candidate(
            {"lr": lr, "clip_norm": clip}, {"steps": 8, "batch_size": 200}, COMMON["model"]
        )
        for lr in SPACE["lr"]
        for clip in SPACE["clip_norm"]
    ]
    return prepare_search(
        candidates,
        OWNERS,
        (X, y),
        PUBLIC,
        RunLaw(law, 3.0),
        fit_options=fit_options or {},
        **options,
    )


def _with(given, **changes):
    from dataclasses import replace

    return replace(given, **changes)


def test_the_cost_is_on_disk_before_the_first_run_and_stays_there(tmp_path, monkeypatch):
    """A crash or Ctrl-C neither reveals anything nor takes the charge back."""
    folder, seen = tmp_path / "run", []

    def interrupt(self, *arguments):
        seen.append(sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")))
        raise KeyboardInterrupt("stopped after 3 of 8 steps of run 2")

    monkeypatch.setattr(trials.TrialTrainer, "_train", interrupt)
    given = _with(_prepared_without_check(monkeypatch), folder=folder)
    with pytest.raises(KeyboardInterrupt) as caught:
        trials.search(given)
    assert str(caught.value) == trials.STOPPED
    assert caught.value.__context__ is None
    assert seen == [["plan.json", "plan.safetensors", "tuning.json"]]
    assert sorted(p.name for p in folder.iterdir() if not p.name.startswith(".")) == seen[0]
    plan = ow.Plan.load(folder / "plan.json")
    assert (plan.epsilon() > 0.98 * OWNERS.epsilon).all()
    monkeypatch.undo()
    with pytest.raises(ow.OwnerwiseError, match="counts as spent, and it cannot be resumed"):
        tune(folder=folder)


def _prepared_without_check(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("ownerwise.tuning.search"), "check", lambda *_: None
    )
    return _prepared()


def test_a_run_that_fails_is_a_run_with_the_worst_score(monkeypatch, capfd):
    given, calls = _prepared(), Counter()

    def fail(model):
        calls["all"] += 1
        if calls["all"] % 2:
            raise RuntimeError("record 17 is odd")
        return float("nan") if calls["all"] % 4 else 1.0

    for seed in range(8):
        given = _with(given, score=fail, stream=ow.SecretStream.from_seed(seed))
        with suppress(ow.OwnerwiseError):
            assert trials.search(given).config["tuning"]["settings"]
    given = _with(given, score=lambda model: 1 / 0, stream=ow.SecretStream())
    with pytest.raises(ow.OwnerwiseError, match="no run succeeded"):
        trials.search(given)
    assert calls["all"] > 8
    assert "odd" not in "".join(capfd.readouterr())


def test_without_any_run_a_fixed_untrained_model_is_released(monkeypatch, tmp_path):
    given = _with(_prepared("poisson"), folder=tmp_path / "run")
    monkeypatch.setattr(type(given.plans[0].tuning.law), "number", lambda self, uniform: 0)
    run = trials.search(given)
    assert run.steps_spent == run.updates == 0
    assert np.array_equal(run.epsilon(), run.plan.epsilon())
    assert (ow.Run.load(tmp_path / "run").epsilon() > 0.9 * OWNERS.epsilon).all()
    streams = [ow.SecretStream(), ow.SecretStream()]
    weights = [
        trials.search(_with(given, folder=None, stream=stream)).model.weight for stream in streams
    ]
    assert torch.equal(*weights)
    assert "tuning: paid" in card_text(run)


def test_runs_that_are_always_made_are_as_many_whatever_their_number(made, monkeypatch):
    given = _prepared("poisson", always_run=True)
    most = given.plans[0].tuning.most
    law = type(given.plans[0].tuning.law)
    for number in (1, 5):
        made.clear()
        monkeypatch.setattr(law, "number", lambda self, uniform, number=number: number)
        run = trials.search(_with(given, stream=ow.SecretStream.from_seed(1)))
        assert len(made) == most
        best = max(made[:number], key=lambda one: one[1])  # later runs do not count
        assert run.config["tuning"]["settings"] == given.described["candidates"][best[0]]


@pytest.mark.parametrize("unit", ["record", "owner"])
def test_one_record_or_owner_moves_the_score_by_at_most_one(unit):
    """Brute force over random predictions: sensitivity 1, on the grid of the noise."""
    rng, grid = np.random.default_rng(3), 2.0**-16
    for _ in range(300):
        count, owners = int(rng.integers(1, 40)), int(rng.integers(1, 8))
        index, correct = rng.integers(0, owners, count), rng.integers(0, 2, count).astype(float)
        whole = contribution_sum(correct, index, owners, unit, grid)
        assert whole / grid == round(whole / grid)
        for left_out in range(owners if unit == "owner" else count):
            keep = index != left_out if unit == "owner" else np.arange(count) != left_out
            rest = contribution_sum(correct[keep], index[keep], owners, unit, grid)
            assert abs(whole - rest) <= 1


def test_a_record_alone_decides_whether_it_is_predicted_correctly():
    """Trap 64: the place of a validation record, and the others, change nothing."""

    class Odd(nn.Module):
        def forward(self, x):
            return torch.stack([x[:, 0] + len(x), 1.5 + 0 * x[:, 0]], 1)  # depends on the batch

    inputs, targets = torch.zeros(20, 3), torch.ones(20, dtype=torch.long)
    owners = ow.Owners(np.arange(20), dict.fromkeys(range(20), 1.0), 1e-3)
    score = ow.PaidScore((inputs, targets), owners, std=1e-3)
    released = score.bind(ow.SecretStream.from_seed(0), "record")(Odd())
    assert released == pytest.approx(20, abs=0.01)


def test_a_paid_score_is_charged_and_noised():
    owners = ow.Owners(IDS, BUDGETS)
    paid = tune(score=ow.PaidScore((X, y), owners), seed=1)
    free = tune(seed=1)
    tuning = paid.plan.tuning
    assert tuning.score_std == pytest.approx(1 / (0.02**0.5 * 0.502), rel=0.01)
    assert tuning.score_records == 20
    assert (paid.plan.noise_multipliers > free.plan.noise_multipliers).all()
    score = ow.PaidScore((X, y), owners, std=5.0).bind(ow.SecretStream.from_seed(0), "record")
    values = np.array([score(nn.Linear(3, 2)) for _ in range(3)])
    assert len(set(values)) == 3  # new noise each time


def test_owners_of_validation_records_outside_the_plan_must_afford_the_score():
    outside = ow.Owners(1000 + np.arange(600), dict.fromkeys(range(1000, 1600), 0.01))
    with pytest.raises(ow.OwnerwiseError, match="600 owners of validation records more than their"):
        tune(score=ow.PaidScore((X, y), outside, std=20.0))
    other = ow.Owners(IDS, dict.fromkeys(range(30), 9.0))
    with pytest.raises(ow.OwnerwiseError, match="other budgets in the score"):
        tune(score=ow.PaidScore((X, y), other))


def test_tuning_on_public_data_is_free_and_says_so():
    data = (torch.randn(300, 3), torch.randint(0, 2, (300,)))
    run = tune(public=True, public_data=data)
    assert run.plan.tuning is None
    assert tuning_line(run).startswith("tuning: on public data; chosen among 4 candidates: lr ")
    assert (run.epsilon() > 0.98 * OWNERS.epsilon).all()
    assert "tuning: on public data" in card_text(run)


def test_every_report_and_card_says_whether_the_choice_was_paid_for(tmp_path):
    plan = ow.plan(OWNERS, steps=4, batch_size=200)
    public_data = (torch.randn(300, 3), torch.randint(0, 2, (300,)))

    def fit(name, **options):
        folder = tmp_path / name
        return ow.Trainer(nn.Linear(3, 2), plan, lr=0.1, folder=folder, **options).fit((X, y))

    runs = [
        ("tuning: paid (the best of a secret random number of runs", tune(folder=tmp_path / "a")),
        ("tuning: not accounted (2 runs)", fit("b")),  # the search counts as one
        ("tuning: not accounted (1 run)", fit("c", seed=0)),
        (
            "tuning: on public data; chosen among 4 candidates: lr ",
            tune(public=True, public_data=public_data, folder=tmp_path / "d"),
        ),
    ]
    for words, run in runs:
        for one in (run, ow.Run.load(run.folder)):
            line = tuning_line(one)
            assert line.startswith(words)
            one.report(tmp_path / "report.html")
            assert line in html.unescape((tmp_path / "report.html").read_text())
            assert line in card_text(one).replace("\\", "")


def test_all_problems_are_listed_before_anything_is_charged(tmp_path):
    with pytest.raises(ow.OwnerwiseError) as caught:
        ow.tune(
            {"lr": [0.1, 0.2], "clipnorm": [1.0]},
            OWNERS,
            (X, y),
            score=None,
            law="normal",
            runs=0,
            folder=tmp_path / "run",
            public=True,
        )
    text = "\n".join(caught.value.problems)
    for part in (
        "clipnorm",
        "did you mean 'clip_norm'?",
        "no model",
        "law is",
        "runs is 0",
        "score is None",
        "public=True",
    ):
        assert part in text
    with pytest.raises(ow.OwnerwiseError, match="NaN"):
        ow.tune(
            SPACE, OWNERS, (X * float("nan"), y), score=PUBLIC, folder=tmp_path / "run", **COMMON
        )
    assert not (tmp_path / "run").exists()
    for space in ({}, {"lr": 0.1}, [{"lr": 0.1}], "lr"):
        with pytest.raises(ow.OwnerwiseError, match="expected"):
            tune_space(space)


def tune_space(space):
    return ow.tune(space, OWNERS, (X, y), score=PUBLIC, **COMMON)


def test_a_module_is_copied_for_every_run():
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    run = tune(model=model, seed=0)
    assert torch.equal(model.weight, before)
    assert not torch.equal(run.model.weight, before)


def test_several_processes_would_each_draw_their_own_trials(monkeypatch, made):
    monkeypatch.setattr(Processes, "here", classmethod(lambda cls: cls(0, 2)))
    with pytest.raises(ow.OwnerwiseError, match="a search in 2 processes: expected one process"):
        tune()
    assert made == []
