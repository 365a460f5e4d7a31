"""`tune`: choose settings, either privately within the budgets or on public data."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from ownerwise.accounting import RunLaw, law_problems
from ownerwise.errors import Problems, known_names
from ownerwise.owners import Owners
from ownerwise.planning import Plan, PlanRequest
from ownerwise.planning.making import make_plan
from ownerwise.planning.tuned_plans import tuned_plans
from ownerwise.processes import Processes, launched_processes
from ownerwise.randomness import SecretStream
from ownerwise.runs import Run, describe_function
from ownerwise.runs.settings import describe_plug
from ownerwise.training import Trainer
from ownerwise.training.settings import TrainerSettings
from ownerwise.tuning.candidates import Candidate, expand, plan_and_training
from ownerwise.tuning.scores import PaidScore, PublicScore
from ownerwise.tuning.trials import Search, check, folder_problems, search

PLAN_NAMES = frozenset(field.name for field in fields(PlanRequest))
_RESERVED = {
    "plan", "seed", "folder", "name", "notes", "progress", "loggers", "evaluate_every",
    "checkpoint_every", "runs", "device", "group_budgets",
}  # fmt: skip
TRAINING_NAMES = frozenset(
    field.name for field in fields(TrainerSettings) if field.name not in _RESERVED | {"_"}
)


def tune(
    space: Mapping[str, Sequence[Any]] | Sequence[Mapping[str, Any]],
    owners: Owners,
    data: Any,
    *,
    score: PublicScore | PaidScore,
    model: nn.Module | Callable[[], nn.Module] | None = None,
    law: str = "geometric",
    runs: float = 10,
    always_run: bool = False,
    public: bool = False,
    public_data: Any = None,
    seed: int | None = None,
    folder: str | PathLike | None = None,
    name: str | None = None,
    test: Any = None,
    test_groups: Any = None,
    test_owners: Any = None,
    **common: Any,
) -> Run:
    """Choose among candidate settings, and return the run with the chosen ones.

    Formal guarantee: a secret, random number of runs is made, each with settings drawn from the
    candidates, and only the best is released: `run.epsilon()` is what the whole search has spent,
    within every owner's budget (see `planning.tuning.Tuning`). Each run therefore gets less than
    the budget. How many runs were made, with which settings and scores, does not leave this
    function. Public: the candidates, the law and the expected number of runs, the plans, and the
    settings that were chosen. How long the search takes is outside the guarantee unless
    `always_run` is set.

    With `public=True`, nothing private is used to choose: each candidate is trained once on
    `public_data`, and the best one once on `data`, with the full budgets. The report says so.

    Args:
        space: settings to combine, {"lr": [0.1, 0.5], "clip_norm": [0.5, 1.0]}, or a list of
            candidates, [{"lr": 0.1}, {"lr": 0.5, "steps": 500}]. Settings are arguments of
            `ownerwise.plan` and `Trainer`, and "model". They must not be chosen by looking at the
            records.
        owners: the owners, with their budgets for the whole search.
        data: the training records, as for `Trainer.fit`.
        score: `PublicScore((X, y))`, or `PaidScore((X, y), owners)` with private validation
            records.
        model: a module, of which each run trains a copy, or a function that returns a new one.
        law: the law of the number of runs: "logarithmic" (cheapest, often a single run),
            "geometric", or "poisson" (dearest; its number varies least).
        runs: the expected number of runs.
        always_run: always make so many runs that more are as unlikely as delta requires, so that
            time tells nothing about their number. That takes much longer, least with "poisson".
        public: choose on `public_data`, at no cost.
        public_data: (X, y), public records that resemble the private ones.
        seed: a fixed seed, which makes the result NOT PRIVATE.
        folder: run folder for the result; None keeps it in memory.
        name: name of the run; by default the folder's.
        test, test_groups, test_owners: as for `Trainer.fit`; NOT covered by the guarantee.
        common: settings that all candidates share.

    Raises:
        OwnerwiseError: if there are any problems, before anything is charged.
        KeyboardInterrupt: on Ctrl-C. The whole search then counts as spent.
    """
    problems = Problems()
    found: list[dict[str, Any]] = []
    with problems.guard():
        found = expand(space)
    with problems.guard():
        _check_names([*found, common], model)
    problems += law_problems(law, runs)
    if not isinstance(score, PublicScore | PaidScore):
        problems.add(
            f"score is {score!r}; expected PublicScore((X, y)), or PaidScore((X, y), owners)"
        )
    elif isinstance(score, PaidScore):
        problems += score.problems()
    if public and (public_data is None or not isinstance(score, PublicScore)):
        problems.add("public=True: expected public_data=(X, y) and score=PublicScore((X, y))")
    if public_data is not None and not public:
        problems.add("public_data without public=True: expected both, or neither")
    place = None if folder is None else Path(folder)
    problems += folder_problems(place)
    problems += process_problems()
    problems.raise_()
    candidates = [make_candidate(one, common, model) for one in found]
    options = {"test": test, "test_groups": test_groups, "test_owners": test_owners}
    if public and isinstance(score, PublicScore):
        return tune_on_public_data(
            candidates, owners, data, public_data, score, seed, place, name, options
        )
    return search(
        prepare_search(
            candidates,
            owners,
            data,
            score,
            RunLaw(law, runs),
            always_run=always_run,
            seed=seed,
            folder=place,
            name=name,
            fit_options=options,
        )
    )


def prepare_search(
    candidates: Sequence[Candidate],
    owners: Owners,
    data: Any,
    score: PublicScore | PaidScore,
    law: RunLaw,
    *,
    always_run: bool = False,
    seed: int | None = None,
    folder: Path | None = None,
    name: str | None = None,
    fit_options: Mapping[str, Any],
) -> Search:
    """Return a planned and checked search; nothing is charged yet."""
    paid = score if isinstance(score, PaidScore) else None
    plans = tuned_plans(
        owners,
        [candidate.request for candidate in candidates],
        law,
        always_run=always_run,
        score_std=None if paid is None else paid.std,
        score_records=1 if paid is None else paid.records,
    )
    stream = SecretStream() if seed is None else SecretStream.from_seed(seed)
    problems = Problems(process_problems())
    if law.name == "poisson" and plans[0].opening_std is not None:
        problems.add(
            "law 'poisson' with column statistics: expected another law, because a search without "
            "any run has no statistics to release"
        )
    scored: Callable[[nn.Module], float]
    if paid is None:
        assert isinstance(score, PublicScore)
        scored = score
    else:
        problems += _outside_problems(paid, plans[0], owners)
        scored = paid.bind(stream, plans[0].unit)
    tuning = plans[0].tuning
    assert tuning is not None
    given = Search(
        candidates,
        plans,
        data,
        scored,
        stream,
        fit_options,
        {
            "kind": "paid",
            "words": tuning.words(),
            "law": law.name,
            "runs": law.mean,
            "always_run": always_run,
            "candidates": [dict(candidate.settings) for candidate in candidates],
            **({} if name is None else {"name": name}),
        },
        seed,
        folder,
    )
    with problems.guard():
        check(given, score)
    problems.raise_()
    return given


def tune_on_public_data(
    candidates: Sequence[Candidate],
    owners: Owners,
    data: Any,
    public_data: Any,
    score: Callable[[nn.Module], float],
    seed: int | None,
    folder: Path | None,
    name: str | None,
    fit_options: Mapping[str, Any],
) -> Run:
    """Train every candidate on public data, and the best one on the private data; see `tune`."""
    stand_ins = _stand_ins(owners, public_data)
    best, best_score = candidates[0], -np.inf
    for candidate in candidates:
        plan = make_plan(stand_ins, candidate.request)
        trainer = candidate.make_trainer(
            plan, kind=_OnPublicData, seed=0, notes={}, progress=False, evaluate_every=plan.steps
        )
        trainer.fit(public_data)
        if (value := score(trainer.model)) > best_score:
            best, best_score = candidate, value
    described = {
        "kind": "public",
        "candidates": [dict(candidate.settings) for candidate in candidates],
        "settings": dict(best.settings),
    }
    trainer = best.make_trainer(
        make_plan(owners, best.request),
        kind=Trainer,
        seed=seed,
        notes={"tuning": described},
        folder=folder,
        **({} if name is None else {"name": name}),
    )
    return trainer.fit(data, **fit_options)


class _OnPublicData(Trainer):
    """A Trainer for public records, which is not counted among the trainings of this process."""

    def _note_training(self, config: dict[str, Any], plan: Plan) -> None:
        """Count nothing: no owner's record is used."""


def process_problems() -> list[str]:
    """Return a problem if several processes would search: each would draw its own trials."""
    count = max(Processes.here().count, launched_processes())
    if count == 1:
        return []
    return [
        f"a search in {count} processes: expected one process, because the number of trials is "
        "secret, and each would draw its own"
    ]


def make_candidate(
    settings: Mapping[str, Any],
    common: Mapping[str, Any],
    model: nn.Module | Callable[[], nn.Module] | None,
) -> Candidate:
    """Return a candidate from its settings and those that all candidates share."""
    of_plan, training = plan_and_training({**common, **settings}, PLAN_NAMES)
    if "constraints" in of_plan:  # the Trainer and the plan need the same object
        training["constraints"] = of_plan["constraints"]
    if "calibration" in of_plan:
        training["calibration"] = of_plan["calibration"]
    make = training.pop("model", model)

    def make_trainer(plan: Plan, *, kind: type[Trainer] = Trainer, **options: Any) -> Trainer:
        new = copy.deepcopy(make) if isinstance(make, nn.Module) else make()
        plugs = {name: copy.deepcopy(value) for name, value in training.items()}
        return kind(new, plan, **plugs, **options)

    described = {name: _described(value) for name, value in settings.items()}
    return Candidate(described, PlanRequest(**of_plan), make_trainer)


def _check_names(settings: Sequence[Mapping[str, Any]], model: Any) -> None:
    known = PLAN_NAMES | TRAINING_NAMES
    names = dict.fromkeys(name for each in settings for name in each)
    problems = Problems(
        f"{name} is not a setting of a plan or of a Trainer; {known_names(name, sorted(known))}"
        for name in names
        if name not in known
    )
    if model is None and not all("model" in {**each, **settings[-1]} for each in settings[:-1]):
        problems.add("there is no model: pass model=, a module or a function that returns one")
    problems.raise_()


def _described(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, type) or callable(value):
        return describe_function(value)
    try:
        return describe_plug(value)
    except (AttributeError, TypeError):
        return repr(value)


def _outside_problems(score: PaidScore, plan: Plan, owners: Owners) -> list[str]:
    """Return a problem if owners who are not in the plan cannot pay for the score."""
    tuning = plan.tuning
    assert tuning is not None
    outside = ~np.isin(score.owners.ids, owners.ids)
    by_owner = plan.unit == "owner"
    over = [
        str(score.owners.ids[at])
        for at in np.flatnonzero(outside).tolist()
        if tuning.score_epsilon(float(score.owners.delta[at])) > score.owners.epsilon[at]
    ]
    inside = ~outside
    places = np.searchsorted(owners.ids, score.owners.ids[inside])
    differ = owners.epsilon[places] != score.owners.epsilon[inside]
    differ |= owners.delta[places] != score.owners.delta[inside]
    unit = "owner" if by_owner else "record"
    problems = []
    if over:
        problems.append(
            f"the score costs {len(over)} owners of validation records more than their budget per "
            f"{unit}: use a larger std, fewer expected runs, or a smaller share"
        )
    if differ.any():
        problems.append(
            "owners have other budgets in the score than in the plan: expected the same table"
        )
    return problems


def _stand_ins(owners: Owners, public_data: Any) -> Owners:
    """Return owners of the public records, with the private owners' budgets in their shares."""
    count = len(public_data[1])
    order = np.argsort(owners.epsilon, kind="stable")
    ends = np.cumsum(owners.records[order]) / owners.records.sum()
    share = (np.random.default_rng(0).permutation(count) + 0.5) / count
    epsilon = owners.epsilon[order[np.searchsorted(ends, share)]]
    return Owners(None, epsilon, float(owners.delta.min()))
