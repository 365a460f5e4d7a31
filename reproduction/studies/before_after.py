"""Calibration in every setting of the results: overall accuracy and strict half, without and with.

    python reproduction/studies/before_after.py

Reads the results of the papers' settings and of calibration.py, releases.py and repairs.py, and
writes reproduction/results/before-after/index.md. IDP-SGD is compared with IDP-SGD calibrated; both
have the same budgets, and the calibrated plan pays for its release. It trains nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ownerwise.files import write_text
from repairs_table import strict_groups, summary

RESULTS = Path(__file__).parents[1] / "results"
PAGE = RESULTS / "before-after/index.md"
PLAIN = "IDP-SGD"

ALIKE = {
    "calibration": {"equal", "adult", "animals"},
    "releases": {"equal", "digits-mixed", "few-mixed"},
    "repairs": {"inputs", "ages", "dimmed", "dimmed-lower"},
    "settings": {"IDP-CIFAR10-A-PF", "IDP-CIFAR10-CLASS-PF", "IDP-MNIST-CLASS-PF"},
}
"""The settings of each study in which owners do not differ in their classes, or not in their
budgets. Elsewhere, owners have different classes."""


@dataclass(frozen=True)
class Change:
    """Overall accuracy and recall of the strict half in per cent, without and with calibration."""

    study: str
    setting: str
    page: str
    overall: tuple[float, float]
    strict: tuple[float, float] | None

    @property
    def alike(self) -> bool:
        """Whether owners do not differ in their classes, or have equal budgets."""
        return self.setting.partition(" ")[0] in ALIKE[self.study]


def changes(folder: Path = RESULTS) -> list[Change]:
    """Return the change in every setting that has results with and without calibration."""
    return [*_settings(folder), *_calibration(folder), *_releases(folder), *_repairs(folder)]


def _settings(folder: Path) -> Iterator[Change]:
    """Yield the changes in the papers' settings."""
    for path in sorted(folder.glob("*/*/runs.json")):
        found = _read(path)
        methods = found.get("methods", {})
        if "idp" in methods and "idp-calibrated" in methods:
            pair = [methods[name]["metrics"] for name in ("idp", "idp-calibrated")]
            overall, strict = (
                _pair(*(one.get(key, {}).get("mean") for one in pair))
                for key in ("accuracy", "strict")
            )
            assert overall is not None
            variant = found["study"].partition("/")[2]
            name = found["setting"] + ("" if variant == "paper" else f" ({variant})")
            page = f"../{found['study']}/index.md"
            yield Change("settings", name, page, overall, strict)


def _calibration(folder: Path) -> Iterator[Change]:
    for path in sorted(folder.glob("calibration/*.json")):
        methods = _read(path)["methods"]
        plain = next(name for name in methods if name.startswith(PLAIN))
        calibrated = next(name for name in methods if name.startswith(f"{plain} calibrated"))
        pair = [_means(methods[name]["figures"]) for name in (plain, calibrated)]
        yield _change("calibration", path, *pair)


def _releases(folder: Path) -> Iterator[Change]:
    for path in sorted(folder.glob("releases/*.json")):
        figures = _read(path)["figures"]
        yield _change("releases", path, *(_means(figures[name]) for name in (PLAIN, "calibrated")))


def _repairs(folder: Path) -> Iterator[Change]:
    for path in sorted(folder.glob("repairs/*.json")):
        found = _read(path)
        strict = strict_groups(found["epsilon"])
        pair = [
            summary(found["methods"][name]["figures"], strict).mean(axis=(0, 1))[:2]
            for name in (PLAIN, "calibrated")
        ]
        yield _change("repairs", path, *pair)


def _means(figures: Any) -> np.ndarray:
    """Return overall accuracy and the strict half, in per cent, over splits and seeds."""
    values = 100 * np.array(figures)
    return values.reshape(-1, values.shape[-1]).mean(axis=0)[:2]


def _change(study: str, path: Path, plain: np.ndarray, calibrated: np.ndarray) -> Change:
    overall, strict = zip(plain.tolist(), calibrated.tolist(), strict=True)
    return Change(study, path.stem, f"../{study}/index.md", overall, strict)


def _pair(plain: float | None, calibrated: float | None) -> tuple[float, float] | None:
    if plain is None or calibrated is None:
        return None
    return 100 * plain, 100 * calibrated


def _read(path: Path) -> Mapping[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def sentence(found: Sequence[Change]) -> str:
    """Return what follows for settings whose owners have different classes."""
    different = [one for one in found if not one.alike and one.strict is not None]
    gains = np.array([one.strict[1] - one.strict[0] for one in different if one.strict])
    overall = np.array([one.overall[1] - one.overall[0] for one in different])
    raised = gains[gains > 0.05]
    return (
        f"the strict half gains in {len(raised)} of {len(gains)} settings, by {raised.min():.1f} "
        f"to {raised.max():.0f} points (median {np.median(raised):.0f}), and overall accuracy "
        f"changes by {overall.min():+.1f} to {overall.max():+.1f} points"
    )


def others(found: Sequence[Change]) -> str:
    """Return what follows for the other settings."""
    alike = [one for one in found if one.alike]
    gains = np.array([one.strict[1] - one.strict[0] for one in alike if one.strict])
    overall = np.array([one.overall[1] - one.overall[0] for one in alike])
    return (
        f"the strict half changes by {gains.min():+.1f} to {gains.max():+.1f} points in "
        f"{len(gains)} settings, and overall accuracy by {overall.min():+.1f} to "
        f"{overall.max():+.1f} points in {len(overall)}"
    )


def page(found: Sequence[Change]) -> str:
    lines = [
        "# Calibration in every setting: without and with", "",
        "`python reproduction/studies/before_after.py` writes this page from the results of all",
        "settings that were run with and without calibration; each links to its intervals and",
        "commands. Percentages on test records, overall and for the strict half (in the papers'",
        "settings: owners with a budget below the mean). Both methods have the same budgets; all",
        "runs have fixed seeds and are NOT PRIVATE. Of the papers' settings, those with a CNN or",
        "an LSTM were not run with calibration.", "",
    ]  # fmt: skip
    for title, alike, words in (
        ("Owners have different classes", False, sentence(found)),
        ("Owners have the same classes, or equal budgets", True, others(found)),
    ):
        lines += [
            f"## {title}", "",
            f"{words[:1].upper()}{words[1:]}.", "",
            "| setting | IDP-SGD | calibrated | overall | strict half |",
            "| --- | ---: | ---: | ---: | ---: |",
            *(_row(one) for one in found if one.alike == alike), "",
        ]  # fmt: skip
    return "\n".join(lines)


def _row(one: Change) -> str:
    study = "" if one.study == "settings" else f", {one.study}"
    strict = one.strict or (None, None)
    before, after = (
        f"{overall:.1f} / " + ("–" if half is None else f"{half:.1f}")
        for overall, half in zip(one.overall, strict, strict=True)
    )
    gains = [f"{one.overall[1] - one.overall[0]:+.1f}"]
    gains.append("–" if one.strict is None else f"{one.strict[1] - one.strict[0]:+.1f}")
    return f"| [{one.setting}]({one.page}){study} | {before} | {after} | {' | '.join(gains)} |"


def main() -> int:
    write_text(PAGE, page(changes()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
