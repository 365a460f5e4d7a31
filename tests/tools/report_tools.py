"""What the tests of report and card share: real small plans with made-up histories."""

from functools import cache

import numpy as np

import ownerwise as ow
from ownerwise.runs import (
    Run,
)

BUDGETS = {"clinic": 0.5, "cohort": 2.0, "volunteers": 8.0}
RECORDS = (200, 300, 500)
STEPS = 200
INO_SETTINGS = {"kind": "INO", "tail": 0.4, "alpha": 1.0, "beta": 1.0, "kappa": 0.0}


@cache
def small_plan(method: str = "sample", accountant: str = "pld", **options) -> ow.Plan:
    owners = ow.Owners(np.repeat(list(BUDGETS), RECORDS), BUDGETS, delta=1e-5)
    settings = {"steps": STEPS, "batch_size": 64, **options}
    return ow.plan(owners, method, accountant=accountant, **settings)


@cache
def wide_plan() -> ow.Plan:
    """A plan of 60 owners with 60 different budgets."""
    budgets = dict(enumerate(np.geomspace(0.3, 9.0, 60).tolist()))
    owners = ow.Owners(np.repeat(np.arange(60), 20), budgets, delta=1e-6)
    return ow.plan(owners, "sample", steps=20, batch_size=64)


def evaluation(recalls: dict[str, float], losses: dict[str, float]) -> dict:
    values = np.array(list(recalls.values()))
    worst = min(recalls, key=lambda name: recalls[name])
    return {
        "loss": float(np.mean(list(losses.values()))),
        "accuracy": float(values.mean() + 0.02),
        "balanced_accuracy": float(values.mean()),
        "worst_group": {"name": worst, "recall": recalls[worst]},
        "spread": float(values.std()),
        "groups": {
            name: {"loss": losses[name], "recall": recalls[name], "records": 100}
            for name in recalls
        },
    }


def made_run(
    label: str = "IDP-SGD",
    *,
    seed: int | None = 0,
    plan: ow.Plan | None = None,
    lift: float = 0.0,
    evaluations: int = 21,
    budgets: dict[str, float] | None = None,
    steps_spent: int | None = None,
    steps: int | None = None,
    with_validation: bool = True,
    **config,
) -> Run:
    """A run whose strict groups learn late; `lift` helps them and costs the lax ones a little.

    `steps` are those of the history, where they should differ from the plan's.
    """
    plan = small_plan() if plan is None else plan
    budgets = dict(BUDGETS) if budgets is None else budgets
    spent = plan.steps if steps_spent is None else steps_spent
    end = spent if steps is None else steps
    noise = np.random.default_rng([len(label), seed or 0])
    eps = np.array(list(budgets.values()))
    strict = 1 - (np.log(eps) - np.log(eps.min())) / max(np.log(eps.max() / eps.min()), 1e-9)
    tilt = noise.normal(0, 0.03, len(eps))
    history = []
    for step in np.linspace(0, end, evaluations).round().astype(int).tolist():
        t = step / max(end, 1)
        slow = 1 - np.exp(-t * (9 - 7 * strict * (1 - lift)))
        recall = 0.1 + (0.82 - 0.25 * strict + lift * (0.16 * strict - 0.04)) * slow + tilt * t
        dip = strict * (1 - lift) * 1.2 * t * np.exp(-6 * t)
        loss = 2.3 - 1.9 * slow + dip
        names = list(budgets)
        validation = evaluation(
            dict(zip(names, recall.clip(0, 1).tolist(), strict=True)),
            dict(zip(names, loss.tolist(), strict=True)),
        )
        history.append(
            {
                "step": step,
                "updates": step,
                "seconds": 0.02 * step,
                "learning_rate": 0.5,
                "validation": validation if with_validation else None,
            }
        )
    settings = {
        "name": f"{label}-{seed}",
        "label": label,
        "seed": seed,
        "model": "Linear(784, 10)",
        "data": "synthetic digits",
        "loss": "cross_entropy",
        "optimizer": {"name": "SGD", "lr": 0.5, "momentum": 0.0},
        "schedule": None,
        "weights": INO_SETTINGS if label.startswith("INO") else None,
        "clipping": {"kind": "Standard"},
        "evaluate_every": 10,
        "groups_are": "owners",
        "group_budgets": budgets,
        **config,
    }
    environment = {"ownerwise": "0.1.0", "torch": "2.13.0", "date": "2025-01-02T03:04:05+00:00"}
    return Run(settings, plan, history, environment, spent, spent)


def two_methods(seeds: int = 3) -> list[Run]:
    return [
        made_run(label, seed=seed, lift=lift)
        for label, lift in (("IDP-SGD", 0.0), ("INO-SGD", 0.7))
        for seed in range(seeds)
    ]
