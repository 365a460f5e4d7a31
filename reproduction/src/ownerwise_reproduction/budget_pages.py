"""A page that compares methods by epsilon, for settings in which all owners have the same budget.

Each such setting is run at several budgets with `--set owners.assignment.budgets=[EPSILON]`. The
runs at each budget form a separate study; this page shows the studies side by side, together with
published results.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike
from pathlib import Path

from ownerwise.files import write_text
from ownerwise.report.markdown import table
from ownerwise_reproduction import summary
from ownerwise_reproduction.amounts import percent
from ownerwise_reproduction.summary import Study

PAGE = "importance/index.md"
TITLE = "Importance sampling, tempered sigmoids and decreasing noise, by epsilon"

_BUDGETS = "owners.assignment.budgets="
_SLIDES = "DPIS, slides"
_ELSEWHERE = "another paper's table"
PUBLISHED: Mapping[str, Mapping[str, Mapping[float, float]]] = {
    "DPIS-IMDB": {
        f"{_SLIDES}: DPIS": {0.5: 59.1, 1: 62.1, 2: 65.9, 3: 68.3, 4: 70.2},
        f"{_SLIDES}: DP-SGD": {0.5: 56.4, 1: 60.3, 2: 63.5, 3: 66.4, 4: 67.4},
        f"{_SLIDES}: tempered sigmoid": {0.5: 57.5, 1: 60.3, 2: 62.8, 3: 65.2, 4: 66.5},
        f"{_SLIDES}: falling noise": {0.5: 56.8, 1: 60.4, 2: 63.6, 3: 66.3, 4: 67.6},
        f"{_SLIDES}: without privacy": dict.fromkeys((0.5, 1, 2, 3, 4), 79.5),
    },
    "DPIS-MNIST": {
        f"{_ELSEWHERE}: DPIS": {1: 97.79, 3: 98.62},
        f"{_ELSEWHERE}: tempered sigmoid": {1: 97.06, 3: 98.22},
    },
    "DPIS-FMNIST": {
        f"{_ELSEWHERE}: DPIS": {1: 86.25, 3: 88.82},
        f"{_ELSEWHERE}: tempered sigmoid": {1: 83.63, 3: 86.29},
    },
}
"""Published accuracies in per cent: {setting: {source: {epsilon: accuracy}}}."""


def families(studies: Sequence[Study]) -> dict[str, dict[float, Study]]:
    """Return {heading: {epsilon: study}} for studies that differ only in their owners' budget."""
    found: dict[str, dict[float, Study]] = {}
    for study in studies:
        budgets = set(study.budgets.values())
        if study.first["setting"] in PUBLISHED and len(budgets) == 1:
            changes = [c for c in study.first["changes"] if not c.startswith(_BUDGETS)]
            heading = summary.heading(study.first["setting"], study.first["profile"], changes)
            found.setdefault(heading, {})[budgets.pop()] = study
    return {heading: dict(sorted(by.items())) for heading, by in found.items()}


def write_page(studies: Sequence[Study], folder: str | PathLike) -> dict[str, str]:
    """Write the page and return {title: file}, or return {} if there is nothing to show.

    Sections on studies whose runs are not at hand are kept.
    """
    found = families(studies)
    if not found:
        return {}
    path = Path(folder) / PAGE
    earlier = path.read_text(encoding="utf-8") if path.exists() else ""
    write_text(path, page(found, _sections(earlier)))
    return {TITLE: PAGE}


def _sections(text: str) -> dict[str, str]:
    """Return {heading: section} of a page."""
    _, *parts = re.split(r"\n\n(?=## )", text.rstrip("\n"))
    return {part.partition("\n")[0].removeprefix("## "): part for part in parts}


def page(
    found: Mapping[str, Mapping[float, Study]], earlier: Mapping[str, str] | None = None
) -> str:
    """Return the Markdown page; `earlier` contains sections that were written earlier."""
    sections = dict(earlier or {})
    for heading, by_budget in found.items():
        sections[heading] = f"## {heading}\n\n{_table(by_budget)}"
    parts = [
        f"# {TITLE}",
        "Test accuracy in per cent by epsilon at delta 1e-5: the mean and, with several seeds, "
        "the standard deviation. The links lead to the seeds, commands and plan hashes. All "
        "methods in a table use the same network and number of steps; only the tempered sigmoid "
        "changes the activation. DP-SGD uses all records that are candidates for importance "
        "sampling; DP-SGD with a smaller batch uses about as many records as importance sampling "
        "accepts. The last column shows how many thousand gradient norms are evaluated per run "
        "and, in parentheses, how many thousand gradients are summed. Published results used "
        "different numbers of steps and, in the second and third tables, probably different "
        "inputs. See [how to use importance "
        "sampling](../../../docs/how-to/importance-sampling.md) for the conclusions.",
    ]
    parts += [sections[heading] for heading in sorted(sections)]
    return "\n\n".join(parts) + "\n"


def _table(by_budget: Mapping[float, Study]) -> str:
    labels = {
        method: study.label(method) for study in by_budget.values() for method in study.methods
    }
    setting = next(iter(by_budget.values())).first["setting"]
    rows = []
    for method, label in labels.items():
        shown = {e: study.methods.get(method) for e, study in by_budget.items()}
        cells = [
            "" if runs is None else percent(summary.over_seeds(runs)["accuracy"])
            for runs in shown.values()
        ]
        work = [summary.gradients(runs) for runs in shown.values() if runs is not None]
        counts = [f"{one[0] / 1000:.0f} ({one[1] / 1000:.0f})" for one in work if one is not None]
        rows.append([label, *cells, counts[0] if counts else ""])
    for whose, numbers in PUBLISHED[setting].items():
        cells = [f"{numbers[e]:g}" if e in numbers else "" for e in by_budget]
        rows.append([whose, *cells, ""])
    heads = [f"[ε {e:g}](../{study.name}/index.md)" for e, study in by_budget.items()]
    return table(["method", *heads, "gradients"], rows)
