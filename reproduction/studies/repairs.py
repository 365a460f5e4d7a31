"""Which repair: all rivals at the same budgets, whether or not owners are classes.

    python reproduction/studies/repairs.py classes mixed inputs    # a few minutes each
    python reproduction/studies/repairs.py --table                 # index.md and the picture

`repairs_data` describes the settings: three from which the advice for users was derived, three
unseen ones on which it is judged, and some more. Every method has the same
budgets (delta 1e-5), clip norm 1 and planning method "sample" ("uniform" for DP-SGD). The learning
rate is chosen among the same four by overall accuracy on validation records, of the first split or
of all three; two final runs for each split are measured on test records. (Except on MNIST, a
validation record of one split may be a test record of another.)

- DP-SGD: all owners at the strictest budget.
- INO-SGD: tail 0.4, smooth order by loss, and the same by a budget-aware order (kappa 1).
- pull: a pull adjustment (tau 1) of IDP-SGD's predictions, with the counts of the training labels
  as if they had been public; costs nothing.
- calibrated: a tenth of the strictest budget is spent on the release, also with INO-SGD, and with
  the pull adjustment in the loss.
- share bands: `balanced_predictions` with width 0.01, without damping.
- lowered: owners train with less than they allow; every budget moves 20, 40 or 70% of the way to
  the strictest; with 40%, also calibrated. dropped: 30 or 50% of the records of owners with budgets
  above the mean are left out (rivals in Figure 20 and Table 3 of the INO-SGD paper).

The rule, derived from the rule settings and written down before an unseen one was run:

1. Owners differ in their classes, whether each has one class or a mixture: calibrate.
2. Owners differ in their inputs (another device, site or population): calibrate, and lower the
   budgets by 40% of the way to the strictest. Lower them further if the strict owners matter more.
3. Use INO-SGD for neither, share bands only where their noise is far below the width, and drop no
   records.

So the rule's choice is "calibrated" for `split`, and "lowered by 40%, calibrated" for `ages` and
`dimmed`. It passes in a setting if, compared with IDP-SGD, the strict half gains and overall
accuracy loses at most half a point.

Runs have fixed seeds and are NOT PRIVATE: they show how private runs would perform. Each setting is
a file in reproduction/results/repairs.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import ownerwise as ow
from ownerwise.files import write_json
from repairs_data import (
    OTHER_SETTINGS,
    SETTINGS,
    SPLITS,
    Part,
    Split,
    kept,
    label_counts,
    lowered,
    mean_epsilon,
)
from repairs_table import RESULTS, stored, write_pages

SEEDS, SEARCH_SEED, CLIP_NORM, DELTA, WIDTH = 2, 900, 1.0, 1e-5, 0.01


@dataclass(frozen=True)
class Method:
    """How a method differs from IDP-SGD."""

    kind: str = "sample"
    weights: Any = None
    plan: dict[str, Any] = field(default_factory=dict)
    pull: bool = False
    bands: bool = False
    lowered: float = 0.0
    dropped: float = 0.0


AWARE = ow.INO(score_by=ow.BudgetAware(1.0))
METHODS = {
    "DP-SGD": Method("uniform"),
    "IDP-SGD": Method(),
    "INO-SGD": Method(weights=ow.INO()),
    "INO-SGD, budget-aware": Method(weights=AWARE),
    "calibrated": Method(plan={"calibration": True}),
    "INO-SGD calibrated": Method(weights=ow.INO(), plan={"calibration": True}),
    "pull, calibrated": Method(plan={"calibration": True}, pull=True),
    "share bands": Method(bands=True),
    "lowered by 20%": Method(lowered=0.2),
    "lowered by 40%": Method(lowered=0.4),
    "lowered by 70%": Method(lowered=0.7),
    "lowered by 40%, calibrated": Method(lowered=0.4, plan={"calibration": True}),
    "dropped 30%": Method(dropped=0.3),
    "dropped 50%": Method(dropped=0.5),
}
OTHER_METHODS = {
    "DP-SGD": METHODS["DP-SGD"],
    "IDP-SGD": METHODS["IDP-SGD"],
    "INO-SGD, hard order": Method(weights=ow.INO(width=0), plan={"hardened": True}),
    "INO-SGD": METHODS["INO-SGD"],
    "INO-SGD, budget-aware": METHODS["INO-SGD, budget-aware"],
    "INO-SGD, budget-aware, tail 0.9": Method(
        weights=ow.INO(tail=0.9, score_by=ow.BudgetAware(1.0))
    ),
    "calibrated": METHODS["calibrated"],
    "lowered by 40%": METHODS["lowered by 40%"],
    "lowered by 40%, calibrated": METHODS["lowered by 40%, calibrated"],
}
MANY_METHODS = {name: METHODS[name] for name in ("IDP-SGD", "share bands", "calibrated")}
PULLED = "pull"  # the same runs as IDP-SGD, shifted at prediction


def figures(outputs: Tensor, part: Part, order: np.ndarray) -> list[float]:
    """Return the overall accuracy, and each group's recall, from the strictest to the laxest."""
    right = (outputs.argmax(dim=1) == part.y).double().numpy()
    return [float(right.mean()), *(float(right[part.group == group].mean()) for group in order)]


class Trained:
    """A method on one split: its plan, made once, and its runs."""

    def __init__(self, name: str, split: Split, method: Method):
        self.setting, self.split, self.method = SETTINGS[name], split, method
        self.budgets = lowered(split.budgets, method.lowered)
        train = split.train
        if method.dropped:
            train = train.at(kept(train.owner, split.budgets, method.dropped, seed=5000))
        self.train, classes = train, self.setting.classes
        options = dict(method.plan)
        if options.pop("calibration", False):
            options["calibration"] = ow.Calibration(classes=classes)
        self.targets, self.bands = train.y, None
        if method.bands:
            part = ow.Partition({"label": tuple(range(classes))})
            listed = ow.constraints.balanced_predictions(part, WIDTH)
            self.bands = ow.RateConstraints(listed, damping=0.0)
            self.targets = part.targets(train.y)
            options["constraints"] = self.bands
        budgets = {owner: self.budgets[owner] for owner in np.unique(train.owner).tolist()}
        self.plan = ow.plan(
            ow.Owners(train.owner, budgets, DELTA), method.kind,
            steps=self.setting.steps, batch_size=self.setting.batch_size, clip_norm=CLIP_NORM,
            **options,
        )  # fmt: skip

    def run(self, rate: float, seed: int) -> tuple[nn.Module, ow.Run]:
        setting, inputs = self.setting, self.train.x.shape[1]
        torch.manual_seed(seed)
        if setting.hidden:
            model: nn.Module = ow.models.mlp(inputs, setting.classes, hidden=setting.hidden)
        else:
            model = nn.Linear(inputs, setting.classes)
            nn.init.zeros_(model.weight)
        trainer = ow.Trainer(
            model, self.plan, lr=rate, seed=seed, weights=self.method.weights,
            constraints=self.bands, repair=self.pull() if self.method.pull else None,
            evaluate_every=setting.steps, progress=False,
        )  # fmt: skip
        return model, trainer.fit((self.train.x, self.targets))

    def pull(self) -> ow.PullAdjustment:
        counts = label_counts(self.train, self.budgets, self.setting.classes)
        return ow.PullAdjustment(tau=1.0, counts=counts, per="budget")

    def score(self, rate: float) -> float:
        """Return the overall accuracy on validation records."""
        held = self.split.validation
        model, _ = self.run(rate, SEARCH_SEED)
        with torch.no_grad():
            return figures(model(held.x), held, self.split.order)[0]

    def measure(self, rate: float) -> dict[str, Any]:
        """Return the figures of the final runs on test records."""
        order, test = self.split.order, self.split.test
        found: dict[str, Any] = {"figures": [], "pull": []}
        for seed in range(SEEDS):
            model, _ = self.run(rate, seed)
            with torch.no_grad():
                outputs = model(test.x)
            found["figures"].append(figures(outputs, test, order))
            if self.method == METHODS["IDP-SGD"]:
                shifted = outputs - self.pull().shift(self.plan).float()
                found["pull"].append(figures(shifted, test, order))
        return found


def best_rate(trained: list[Trained]) -> float:
    setting = trained[0].setting
    scores = {
        rate: np.mean([one.score(rate) for one in trained[: setting.search_splits]])
        for rate in setting.rates
    }
    return max(scores, key=lambda rate: scores[rate])


def run(name: str) -> None:
    splits = [SETTINGS[name].make(split) for split in range(SPLITS)]
    methods = OTHER_METHODS if name in OTHER_SETTINGS else METHODS
    if name == "many":
        methods = MANY_METHODS
    path = RESULTS / f"{name}.json"
    RESULTS.mkdir(exist_ok=True)
    results = stored(path) or {"epsilon": mean_epsilon(splits[0]), "methods": {}}
    for label, method in methods.items():
        if label in results["methods"]:
            continue
        trained = [Trained(name, split, method) for split in splits]
        rate = best_rate(trained)
        found = [one.measure(rate) for one in trained]
        entry = {"rate": rate, "figures": [one["figures"] for one in found]}
        results["methods"][label] = entry
        if found[0]["pull"]:
            pulled = {"rate": rate, "figures": [one["pull"] for one in found]}
            results["methods"][PULLED] = pulled
        write_json(path, results, indent=None)
        overall = np.array(entry["figures"])[..., 0].mean()
        print(f"{name}, {label}: {100 * overall:.1f}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", help=", ".join(SETTINGS))
    parser.add_argument("--table", action="store_true", help="write index.md and the picture")
    options = parser.parse_args()
    unknown = set(options.settings) - set(SETTINGS)
    if unknown:
        parser.error(f"{', '.join(unknown)}: expected {', '.join(SETTINGS)}")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in options.settings:
        run(name)
    if options.table:
        write_pages()
    return 0


if __name__ == "__main__":
    sys.exit(main())
