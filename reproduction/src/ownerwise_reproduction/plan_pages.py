"""Plans for the settings, without training: PLD compared with RDP, and spending over the steps.

Both accountants plan for the same budgets. The tighter accountant (PLD) needs less noise. With
`sample`, the sampling rates differ as well; with `scale`, the clip norms do.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.files import write_json, write_text
from ownerwise.owners import (
    Owners,
)
from ownerwise.planning import (
    Plan,
    plan,
)
from ownerwise.report.markdown import table
from ownerwise_reproduction.drawing import colour, finish, new_figure, save
from ownerwise_reproduction.population import populate
from ownerwise_reproduction.settings import Setting

SETTINGS = ("IDP-MNIST-A", "IDP-MNIST-B", "MN-PC", "CL-PC", "CA-MLP", "SU-LS", "PN")
"""Settings for which plans are made by default."""

SHOWN = "IDP-MNIST-B"
"""The setting for which the figure shows spending, as in Figure 4 of the IDP-SGD paper."""

METHODS = ("uniform", "sample", "scale")
ACCOUNTANTS = ("pld", "rdp")
_POINTS = 16
_MOST_BUDGETS = 4
PAGE = "plans/index.md"
TITLE = "Plans with PLD and RDP accounting"


@dataclass(frozen=True)
class PlanSummary:
    """A summary of a plan, with the values for the strictest owner.

    Attributes:
        setting, method, accountant: setting, method and accountant of the plan.
        own: whether the setting itself uses this method.
        epsilon: budget of the strictest owner.
        noise_std: standard deviation of the noise added to the sum.
        sampling_rate, clip_norm: sampling rate and clip norm of the strictest owner.
        least_spent: smallest fraction of their budget that any owner has spent after all steps.
        hash: hash of the plan.
    """

    setting: str
    method: str
    accountant: str
    own: bool
    epsilon: float
    noise_std: float
    sampling_rate: float
    clip_norm: float
    least_spent: float
    hash: str


@dataclass(frozen=True, eq=False)
class Planned:
    """The plans for a setting, {(method, accountant): plan}."""

    setting: Setting
    plans: dict[tuple[str, str], Plan]

    def rows(self) -> Iterator[PlanSummary]:
        """Yield a summary of every plan."""
        for (method, accountant), made in self.plans.items():
            strictest = int(np.argmin(made.targets))
            yield PlanSummary(
                self.setting.name,
                method,
                accountant,
                method == self.setting.sections["plan"]["method"],
                float(made.targets[strictest]),
                made.noise_std,
                float(made.sampling_rates[strictest]),
                float(made.clip_norms[strictest]),
                float((made.epsilon() / made.targets).min()),
                made.hash,
            )


def make_plans(setting: Setting, data_dir: str | PathLike | None = None) -> Planned:
    """Make plans for a setting with every method and accountant.

    The setting's data is read, but no model is trained.
    """
    config = setting.configure(0)
    owners = populate(config, setting.label_noise, data_dir).owners()
    asked = {key: value for key, value in config["plan"].items() if key != "mixture"}
    return Planned(
        setting,
        {
            (method, accountant): _plan(owners, asked, method, accountant)
            for method in METHODS
            for accountant in ACCOUNTANTS
        },
    )


def _plan(owners: Owners, asked: dict[str, Any], method: str, accountant: str) -> Plan:
    return plan(owners, **{**asked, "method": method, "accountant": accountant})


def write_page(
    planned: Sequence[Planned], folder: str | PathLike, command: str, *, figures: bool = True
) -> list[Path]:
    """Write the page, its JSON file and its figure, and return their paths (the page first)."""
    place = Path(folder) / PAGE
    rows = [row for one in planned for row in one.rows()]
    content = {"command": command, "plans": [asdict(row) for row in rows]}
    files = [place, place.with_name("plans.json")]
    shown = [one for one in planned if figures and one.setting.name == SHOWN]
    for one in shown:
        files.append(place.with_name("spending.svg"))
        save(spending_figure(one), files[-1])
    write_json(files[1], content)
    write_text(files[0], page(rows, files[2:], command))
    return files


def page(rows: Sequence[PlanSummary], pictures: Sequence[Path], command: str) -> str:
    """Return the Markdown page about the plans."""
    parts = [
        f"# {TITLE}",
        "The table shows the noise added to the sum at each step, and the strictest owner's "
        "sampling rate and clip norm, with two accountants: privacy loss distributions (PLD) and "
        "Rényi divergences (RDP). Budgets, steps and expected batch sizes are the same for both. "
        "`uniform` is DP-SGD at the strictest budget. The last column is the smallest fraction "
        "of a budget that any owner has spent after all steps; with individual rates or clip norms "
        "it is nearly 100%. A star marks the setting's own method.",
        _table(rows),
    ]
    for picture in pictures:
        parts += [
            "## All budgets are spent at the same rate",
            f"Epsilon spent by owners with each budget over the steps of {SHOWN}. The dotted line "
            "is DP-SGD at the strictest budget.",
            f"![{picture.stem}]({picture.name})",
        ]
    parts += [
        "## How to reproduce it",
        f"    {command}",
        "Nothing is trained. `plans.json` next to this page lists the plan hashes.",
    ]
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[PlanSummary]) -> str:
    together: dict[tuple[str, str], dict[str, PlanSummary]] = {}
    for row in rows:
        together.setdefault((row.setting, row.method), {})[row.accountant] = row
    lines = []
    for (setting, method), by_accountant in together.items():
        pld, rdp = (by_accountant[name] for name in ACCOUNTANTS)
        lines.append(
            [
                f"{setting}, ε {pld.epsilon:g}",
                method + (" *" if pld.own else ""),
                *(f"{row.noise_std:.4f}" for row in (pld, rdp)),
                f"{100 * (pld.noise_std / rdp.noise_std - 1):+.1f} %",
                *(f"{row.sampling_rate:.5f}" for row in (pld, rdp)),
                *(f"{row.clip_norm:.4f}" for row in (pld, rdp)),
                f"{100 * pld.least_spent:.1f} %",
            ]
        )
    pairs = [f"{what}, {name.upper()}" for what in ("rate", "clip norm") for name in ACCOUNTANTS]
    header = ["setting", "method", "noise, PLD", "noise, RDP", "PLD against RDP", *pairs, "spent"]
    return table(header, lines, texts=2)


def spending_figure(planned: Planned) -> Any:
    """Plot the epsilon spent over the steps for each budget, with `sample` and `scale`."""
    figure, axes = new_figure(
        2, "Every owner's budget is used in full; DP-SGD stops at the strictest"
    )
    steps, uniform = _spending(planned.plans["uniform", "pld"])
    for axis, method in zip(axes, ("sample", "scale"), strict=True):
        made = planned.plans[method, "pld"]
        budgets, first = np.unique(made.targets, return_index=True)
        chosen = np.linspace(0, len(budgets) - 1, min(len(budgets), _MOST_BUDGETS)).round()
        _, spent = _spending(made)
        for owner in first[chosen.astype(int)]:
            axis.plot(steps, spent[:, owner], label=f"ε {made.targets[owner]:g}")
        axis.plot(steps, uniform[:, 0], ":", color=colour(6), label="DP-SGD")
        axis.set_title(method)
    return finish(figure, axes, "step", "ε spent per record")


def _spending(made: Plan) -> tuple[list[int], np.ndarray]:
    """Return selected step counts, and the epsilon that each owner (column) has spent by then."""
    steps = [round(made.steps * k / _POINTS) for k in range(1, _POINTS + 1)]
    spent = [np.zeros(len(made.targets)), *map(made.epsilon, steps)]
    return [0, *steps], np.array(spent)
