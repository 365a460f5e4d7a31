"""What else could tell how many runs a search made, or make it spend more than was charged."""

import logging
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import ownerwise as ow
from ownerwise.accounting import Exposure, RunLaw
from ownerwise.planning.request import PlanRequest
from ownerwise.planning.tuned_plans import tuned_plans
from ownerwise.tuning import prepare_search, trials
from ownerwise.tuning.search import make_candidate

torch.manual_seed(0)
X = torch.randn(300, 3)
y = (X[:, 0] > X[:, 1]).long()
OWNERS = ow.Owners(np.arange(300) % 30, {at: (2.0, 4.0)[at % 2] for at in range(30)})
PUBLIC = ow.PublicScore((torch.randn(100, 3), torch.randint(0, 2, (100,))))

pytestmark = pytest.mark.filterwarnings("ignore:this process has already trained")


class Augmented(torch.utils.data.Dataset):
    """Draws from every global source of random numbers."""

    def __len__(self):
        return 300

    def __getitem__(self, at):
        noise = np.random.rand() + random.random()  # noqa: NPY002
        return X[at] + 1e-6 * noise * torch.randn(3), y[at]


class Talkative(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        logging.getLogger("talkative").warning("a new model")

    def forward(self, x):
        return self.linear(x)


def prepared(model=lambda: nn.Linear(3, 2), law="geometric", data=(X, y), score=PUBLIC):
    common = {"steps": 3, "batch_size": 100}
    candidates = [make_candidate({"lr": lr}, common, model) for lr in (0.1, 1.0)]
    return prepare_search(candidates, OWNERS, data, score, RunLaw(law, 3.0), fit_options={})


def test_the_state_of_random_numbers_does_not_tell_how_many_runs_were_made():
    given = prepared(data=Augmented())

    def states():
        kind, keys, *rest = np.random.get_state()  # noqa: NPY002
        return (
            torch.random.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest
        )  # fmt: skip

    before = states()
    trials.search(replace(given, stream=ow.SecretStream.from_seed(1)))
    assert states() == before
    with pytest.raises(KeyboardInterrupt):
        trials.search(replace(given, score=_interrupt, stream=ow.SecretStream()))
    assert states() == before


def _interrupt(model):
    raise KeyboardInterrupt


def test_runs_log_nothing(capsys):
    """Handlers that were set up earlier keep the original output."""
    given, handler = prepared(Talkative), logging.StreamHandler(sys.stderr)
    records = []
    handler.emit = records.append
    logging.getLogger().addHandler(handler)
    try:
        trials.search(replace(given, stream=ow.SecretStream()))
        assert not records
        logging.getLogger("talkative").warning("after the search")
        assert len(records) == 1
    finally:
        logging.getLogger().removeHandler(handler)


def test_an_interrupted_search_keeps_no_count_in_its_error():
    """Debuggers and error trackers show the variables of every frame."""
    given = prepared()
    with pytest.raises(KeyboardInterrupt) as caught:
        trials.search(replace(given, score=_interrupt, stream=ow.SecretStream()))
    assert caught.value.__context__ is None
    traceback, names = caught.value.__traceback__, set()
    while traceback is not None:
        names |= traceback.tb_frame.f_locals.keys()
        traceback = traceback.tb_next
    assert not names & {"runs", "number", "best", "draws", "trial", "choice"}


def test_a_run_that_exits_is_a_run_that_fails():
    def leave(model):
        raise SystemExit(3)

    with pytest.raises(ow.OwnerwiseError, match="no run succeeded"):
        trials.search(replace(prepared(), score=leave, stream=ow.SecretStream()))


def test_a_plan_of_a_search_pays_for_nothing_but_the_search(tmp_path, monkeypatch):
    """A search without any run released its outcome: a run after it would not be paid for."""
    given = replace(prepared(law="poisson"), folder=tmp_path / "run")
    monkeypatch.setattr(RunLaw, "number", lambda self, uniform: 0)
    run = trials.search(given)
    assert run.steps_spent == 0
    make = given.candidates[0].make_trainer
    kept = {"evaluate_every": 3, "checkpoint_every": 3, "name": run.config["name"]}
    again = make(run.plan, notes={"tuning": run.config["tuning"]}, folder=tmp_path / "run", **kept)
    for trainer, resume in (
        (again, True),
        (make(run.plan, folder=tmp_path / "new"), False),
        (make(run.plan), False),
    ):
        with pytest.raises(ow.OwnerwiseError, match="plan of a search"):
            trainer.fit((X, y), resume=resume)
    assert ow.Run.load(tmp_path / "run").steps_spent == 0
    assert not (tmp_path / "new").exists()


def test_a_folder_that_was_used_in_the_meantime_keeps_its_run(tmp_path):
    """Two searches were prepared for one folder; the second finds the result of the first."""
    laws = ("geometric", "poisson")
    first, second = (replace(prepared(law=law), folder=tmp_path / "run") for law in laws)
    trials.search(first)
    before = {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ow.OwnerwiseError, match="already contains a run"):
        trials.search(second)
    assert {path.name: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


class Fragile(nn.Module):
    """Fails on inputs above 10, as an embedding does on unknown words."""

    def __init__(self, failure):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.failure = failure

    def forward(self, x):
        outputs = torch.stack([0 * x[:, 0], 1 + 0 * x[:, 0]], 1)
        if (x > 10).any():
            if self.failure == "raises":
                raise IndexError("index out of range")
            return {
                "NaN": outputs * float("nan"),
                "several": outputs.repeat(3, 1),
                "none": outputs[:0],
            }[self.failure]
        return outputs


@pytest.mark.parametrize("unit", ["record", "owner"])
@pytest.mark.parametrize("failure", ["raises", "NaN", "several", "none"])
def test_a_record_that_cannot_be_predicted_moves_the_score_by_at_most_one(failure, unit):
    """Adding it must not make the run fail: that would show whether it is there."""
    inputs, targets = torch.zeros(12, 3), torch.ones(12, dtype=torch.long)
    inputs[5] = 11.0
    index = np.arange(12) // 2

    def released(keep):
        owners = ow.Owners(index[keep], dict.fromkeys(set(index[keep].tolist()), 1.0), 1e-3)
        score = ow.PaidScore((inputs[keep], targets[keep]), owners, std=1e-4)
        return score.bind(ow.SecretStream.from_seed(0), unit)(Fragile(failure))

    every = np.arange(12)
    whole, without = released(every), released(np.delete(every, [4, 5] if unit == "owner" else 5))
    assert abs(whole - without) <= 1 + 1e-3
    assert released(every[:4]) == pytest.approx(4 if unit == "record" else 2, abs=0.01)


def test_a_score_that_cannot_work_is_refused_before_anything_is_charged():
    def broken(model, inputs, targets):
        raise ZeroDivisionError("of a public score")

    with pytest.raises(ow.OwnerwiseError, match="of a public score"):
        prepared(score=ow.PublicScore((X, y), measure=broken))
    pairs = torch.stack([y, y], 1)
    for targets, predict in ((pairs, None), (y, lambda outputs: outputs)):
        options = {} if predict is None else {"predict": predict}
        with pytest.raises(ow.OwnerwiseError, match="score"):
            prepared(score=ow.PaidScore((X, targets), OWNERS, std=20.0, **options))


def test_an_owner_with_one_training_record_may_have_more_validation_records():
    """All records of an owner together: those of the score count too."""
    owners = ow.Owners(np.arange(600), dict.fromkeys(range(600), 2.0), 1e-5)
    request, law = PlanRequest(steps=20, batch_size=200), RunLaw("geometric", 3.0)
    plan = tuned_plans(owners, [request], law, score_std=8.0, score_records=5)[0]
    alone = plan.tuning.score_epsilon(1e-5, 5)
    assert (plan.owner_epsilon() >= alone).all()
    assert (alone > plan.epsilon()).all()


def test_the_tail_of_the_number_of_runs_is_paid_for_by_all_records_together():
    """With always_run, (1 + e^epsilon) P(K > most) is subtracted, with the epsilon stated."""
    owners = ow.Owners(np.repeat(np.arange(100), 6), dict.fromkeys(range(100), 0.7), 1e-5)
    request, law = PlanRequest(steps=10, batch_size=60), RunLaw("geometric", 3.0)
    plan = tuned_plans(owners, [request], law, always_run=True)[0]
    epsilon = plan.owner_epsilon()[0]
    tail = (1 - 1 / 3) ** plan.tuning.most
    paid = 1e-5 * (1 - 1e-6) - (1 + np.exp(epsilon)) * tail  # left for the search
    segments = [plan.run_cost.segments(Exposure(*(part[0] for part in plan.exposures)), 6)]
    assert np.isfinite(epsilon)
    assert law.epsilon_of(segments, paid) <= epsilon


def test_hardened_searches_state_no_figure_for_several_records():
    """More records of one owner make batches overflow more often; searches have no bound."""
    owners = ow.Owners(np.arange(300) // 3, dict.fromkeys(range(100), 2.0), 1e-5)
    request = PlanRequest(steps=10, batch_size=60, hardened=True)
    plan = tuned_plans(owners, [request], RunLaw("geometric", 3.0))[0]
    assert np.isnan(plan.owner_epsilon()).all()


class Remembers(nn.Module):
    """Keeps something of what it was evaluated on."""

    def __init__(self, *, in_buffer):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.register_buffer("total", torch.zeros(3))
        self.in_buffer, self.last = in_buffer, None

    def forward(self, x):
        if not self.training:
            self.last = x.detach().clone()
            if self.in_buffer:
                self.total += x.sum(0)
        return self.linear(x)


def test_the_released_model_has_not_seen_the_validation_records():
    """Neither its buffers nor its attributes; a state that lasts would also join the records."""
    score = ow.PaidScore((X, y), OWNERS, std=20.0)
    model = Remembers(in_buffer=True)
    score.bind(ow.SecretStream.from_seed(0), "record")(model)
    assert model.last is None
    assert not model.total.any()
    assert "changes when it is evaluated" in "".join(score.problems_with(model))
    assert not model.total.any()
    assert not score.problems_with(Remembers(in_buffer=False))
