"""The papers' claims beside results made by hand."""

import tomllib
from importlib.resources import files

import numpy as np
import pytest
from scipy import stats

from made_results import result
from ownerwise.errors import OwnerwiseError
from ownerwise_reproduction import claim_pages, claims, summary

ENTRY = {
    "paper": "INO-SGD", "where": "Table 9", "claim": "it helps", "theirs": 60.0, "deviation": 1.0,
    "setting": "digits", "method": "ino", "metric": "accuracy",
}  # fmt: skip


def find(results, **changed):
    return claims.find(claims.make_claims([ENTRY | changed]), summary.studies(results))


def both(**changed):
    return [
        result("idp", 0, **changed),
        result("idp", 1, (0.4, 0.4, 0.6, 0.8), **changed),
        result("ino", 0, (0.5, 0.6, 0.6, 0.7), **changed),
        result("ino", 1, (0.5, 0.5, 0.6, 0.8), **changed),
    ]


def test_all_claims_can_be_read():
    found = claims.read()
    text = (files("ownerwise_reproduction") / "claims.toml").read_text()
    assert len(found) == len(tomllib.loads(text)["claim"]) > 40
    numbers = {(claim.setting, claim.method, claim.changes, claim.theirs) for claim in found}
    scale = ('plan.method="scale"',)
    assert {
        ("IDP-MNIST-A", "uniform", (), 96.75),
        ("IDP-MNIST-A", "idp", (), 97.81),
        ("IDP-MNIST-A", "idp", scale, 97.78),
        ("IDP-MNIST-B", "idp", (), 97.6),
        ("IDP-MNIST-B", "idp", scale, 97.54),
        ("CL-PC", "idp", (), 63.35),
        ("CL-PC", "ino", (), 66.73),
    } <= numbers


def test_a_number_with_its_command():
    (found,) = find(both())
    assert found.theirs == "60.00 ± 1.00 %"
    assert found.ours == "60.00 ± 0.00 %"
    assert found.distance == pytest.approx(0.0)
    assert found.verdict == "reached"
    assert found.seeds == 2
    assert found.study == "digits/paper"
    assert found.command == "ownerwise experiments run digits --method ino --seeds 2"


def test_a_difference_is_over_seeds_that_both_have():
    results = [*both(), result("ino", 2, (1.0, 1.0, 1.0, 1.0))]
    (found,) = find(results, minus="idp", theirs=10.0)
    assert found.ours == "+7.50 [too few seeds] points"  # 0.6 - 0.5 and 0.6 - 0.55
    assert found.distance == pytest.approx(-2.5)
    assert found.verdict == "not reached"
    assert found.seeds == 2
    assert found.command == "ownerwise experiments run digits --method idp,ino --seeds 2"
    assert find([result("idp", 0), result("ino", 1)], minus="idp")[0].ours == "not run"


def test_claims_without_results_say_so():
    (found,) = find([result("idp")], minus="idp", changes=['plan.method="scale"'])
    assert found.ours == "not run"
    assert found.study is found.distance is None
    assert found.verdict == ""
    assert found.command == (
        "ownerwise experiments run digits --method idp,ino --seeds 5 --set 'plan.method=\"scale\"'"
    )
    assert find(both(), changes=["plan.steps=9"])[0].ours == "not run"
    shown = claim_pages.page_part([found])
    assert "| not run | theirs | command |" in shown
    assert "| it helps (INO-SGD, Table 9) | 60.00 ± 1.00 points | `run digits --method" in shown
    assert "](" not in shown
    assert "The claims above do not cover these results:\n\n- IDP-SGD, Table 3" in shown


def test_every_profile_that_was_run_has_its_row():
    found = find([*both(), *both(profile="short")])
    assert [one.heading for one in found] == ["digits", "digits (short profile)"]
    assert found[1].command.endswith("--seeds 2 --profile short")


def test_other_measures():
    def ours(**changed):
        return find(both(), **changed)[0].ours

    assert ours(metric="group:a", method="idp") == "30.00 ± 14.14 %"
    assert ours(metric="gap", method="idp") == "50.00 points"  # 0.8 - 0.3
    assert ours(metric="drop_end", method="idp") == "50.00 ± 0.00 %"
    assert ours(metric="correlation", minus="idp").startswith("r = -0.9")


def test_a_drop_that_is_not_there_ends_at_once():
    run = result("idp", 0)
    run["history"][1]["groups"]["a"]["loss"] = 1.9
    assert find([run], metric="drop_end", method="idp")[0].ours == "0.00 %"


def test_reaching_a_recall_early_is_compared_with_the_other_methods_own_curve():
    """IDP-SGD is half-way where it ends, so INO-SGD, which is, too, is no earlier."""
    results = both()
    for run in results:
        groups = run["history"][1]["groups"]
        for group in groups.values():
            group["recall"] = 0.9
    (found,) = find(results, metric="reach", minus="idp", expect="below")
    assert found.ours == "after 50 % of the steps, IDP-SGD itself after 50 %"
    assert found.verdict == "undecided"
    (later,) = find(both(), metric="reach", method="idp", minus="ino")
    assert later.ours == "after 100 % of the steps, IDP-SGD itself after 100 %"


@pytest.mark.parametrize(
    ("gains", "expect", "verdict"),
    [
        ((0.10, 0.11, 0.12), "above", "agrees"),
        ((0.10, 0.11, 0.12), "kept", "agrees"),
        ((0.10, 0.11, 0.12), "below", "disagrees"),
        ((-0.10, -0.11, -0.12), "above", "disagrees"),
        ((-0.10, -0.11, -0.12), "kept", "disagrees"),
        ((-0.004, -0.005, -0.006), "kept", "agrees"),  # certainly less, but by less than a point
        ((-0.10, -0.11, -0.12), "below", "agrees"),
        ((-0.10, 0.11, 0.12), "above", "undecided"),
        ((-0.10, 0.11, 0.12), "kept", "undecided"),
        ((-0.001, 0.0, 0.001), "kept", "agrees"),  # to within a point
        ((-0.001, 0.0, 0.001), "above", "undecided"),
        ((0.10,), "above", "undecided"),
        ((0.10, 0.10), "above", "undecided"),  # fewer than three seeds
        ((0.10, 0.11, 0.12), None, ""),
    ],
)
def test_verdicts(gains, expect, verdict):
    results = [result("idp", seed, (0.5,) * 4) for seed in range(len(gains))]
    results += [result("ino", seed, (0.5 + gain,) * 4) for seed, gain in enumerate(gains)]
    changed = {} if expect is None else {"expect": expect}
    (found,) = find(results, minus="idp", theirs="some words", **changed)
    assert found.verdict == verdict
    if len(gains) > 2:
        mean, error = 100 * np.mean(gains), 100 * stats.sem(gains)
        low, high = stats.t.interval(0.95, len(gains) - 1, mean, error)
        assert found.ours == f"{mean:+.2f} [{low:.2f}, {high:.2f}] points"


def test_a_gap_counts_as_reached_if_it_is_at_most_the_papers():
    assert find(both(), metric="gap", method="idp", theirs=60.0)[0].verdict == "reached"
    assert find(both(), metric="gap", method="idp", theirs=40.0)[0].verdict == "not reached"


def test_the_table_and_its_notes():
    found = find(both(), note="other data", theirs=50.0)
    shown = claim_pages.page_part([*found, *found])
    rows = [line for line in shown.splitlines() if line.startswith("| reached")]
    assert rows[0] == (
        "| reached | it helps (INO-SGD, Table 9) | same model | 50.00 ± 1.00 % | "
        "**60.00 ± 0.00 %** (+10.00), "
        "2 seeds, [digits](digits/paper/index.md) | `run digits --method ino --seeds 2` |"
    )
    assert "2 claims were tested: 2 reached. Another 0 claims were not tested." in shown
    assert shown.count("- INO-SGD, Table 9, digits: other data") == 1
    assert "| not run" not in shown


def test_all_problems_of_claims_at_once():
    with pytest.raises(OwnerwiseError) as error:
        claims.make_claims(
            [
                ENTRY | {"setting": "digitz", "metric": "luck", "extra": 1},
                {"paper": "INO-SGD"},
                ENTRY | {"metric": "reach"},
                ENTRY | {"metric": "gap", "minus": "idp"},
                ENTRY | {"method": "best"},
                ENTRY | {"expect": "up"},
                ENTRY | {"model": "larger"},
            ]
        )
    text = "\n".join(error.value.problems)
    assert "model 'larger': expected one of same model, fixed features, pretrained" in text
    for words in (
        "claim 1: extra: expected paper", "no setting 'digitz'", "metric 'luck'", "claim 2: where",
        "claim 3: metric reach", "claim 4: metric gap", "claim 5: method 'best'",
        "claim 6: expect 'up': expected one of above",
        "claim 6: expect applies only to comparisons",
    ):  # fmt: skip
        assert words in text


def in_setting(name, seed, groups):
    return result("idp", seed, groups) | {"setting": name}


def test_a_difference_from_another_setting():
    ours = [in_setting("digits", seed, (0.6, 0.7, 0.8, 0.9)) for seed in range(3)]
    other = [in_setting("MN-PC", seed, (0.5, 0.6, 0.7, 0.8 + 0.01 * seed)) for seed in range(3)]
    asked = {"method": "idp", "minus": "idp", "minus_setting": "MN-PC", "expect": "above"}
    (found,) = find([*ours, *other], **asked, theirs="more")
    steps = [10.0, 9.75, 9.5]
    low, high = stats.t.interval(0.95, 2, np.mean(steps), stats.sem(steps))
    assert found.ours == f"+9.75 [{low:.2f}, {high:.2f}] points"
    assert (found.verdict, found.study) == ("agrees", "digits/paper")
    assert found.command == (
        "ownerwise experiments run MN-PC --method idp --seeds 3 && "
        "ownerwise experiments run digits --method idp --seeds 3"
    )
    assert "| `run MN-PC --method idp --seeds 3 && run digits" in claim_pages.page_part([found])
    changed = asked | {"minus_changes": ["plan.steps=3"]}
    assert find([*ours, *other], **changed, theirs="more")[0].ours == "not run"
    assert find([*ours, *other[:1]], **asked, theirs="more")[0].verdict == "undecided"


def test_a_setting_of_another_method_needs_that_method():
    with pytest.raises(OwnerwiseError, match="minus is missing"):
        claims.make_claims([ENTRY | {"minus_setting": "digits"}])
