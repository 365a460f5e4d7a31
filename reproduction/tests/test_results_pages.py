"""What docs/ says about the results follows from the files in reproduction/results."""

import importlib
import json
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "reproduction/results"


@pytest.fixture(scope="module")
def before_after():
    """The study with this name, which imports others from its folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "reproduction/studies"))
        yield importlib.import_module("before_after")


def words(page):
    """A page without its line breaks."""
    return " ".join((ROOT / "docs" / page).read_text(encoding="utf-8").split())


def test_the_comparison_without_and_with_calibration_is_up_to_date(before_after):
    written = (RESULTS / "before-after/index.md").read_text(encoding="utf-8")
    assert written == before_after.page(before_after.changes(RESULTS))


@pytest.mark.parametrize("page", ["results.md", "how-to/which-repair.md"])
def test_pages_state_in_how_many_settings_strict_owners_gain(page, before_after):
    gains, _ = before_after.sentence(before_after.changes(RESULTS)).split(" (", 1)
    assert gains.startswith("the strict half gains in ")
    settings, points = gains.removeprefix("the strict half gains in ").split(", by ")
    assert f"in {settings}" in words(page)
    assert f"{points.removesuffix(' points')} points" in words(page)


def test_results_page_counts_the_claims():
    findings = json.loads((RESULTS / "claims.json").read_text(encoding="utf-8"))
    found = Counter(one["verdict"] for one in findings if one["study"] is not None)
    assert (
        f"We tested {found.total()} claims and list all of them: {found['reached']} numbers were "
        f"reached and {found['not reached']} were not, {found['agrees']} statements agree with our "
        f"results and {found['disagrees']} disagree, {found['undecided']} remain undecided, and "
        f"{found['']} have no number to compare with"
    ) in words("results.md")


def test_a_setting_counts_only_if_its_strict_half_gains(before_after):
    made = [
        before_after.Change("settings", name, "", overall, strict)
        for name, overall, strict in (
            ("A", (80.0, 81.0), (70.0, 72.0)),
            ("B", (80.0, 79.5), (70.0, 69.0)),
            ("C", (80.0, 80.0), (60.0, 66.0)),
            ("IDP-CIFAR10-A-PF", (80.0, 70.0), (60.0, 30.0)),  # equal budgets on average
        )
    ]
    assert before_after.sentence(made) == (
        "the strict half gains in 2 of 3 settings, by 2.0 to 6 points (median 4), and overall "
        "accuracy changes by -0.5 to +1.0 points"
    )
    assert "changes by -30.0 to -30.0 points in 1 settings" in before_after.others(made)
