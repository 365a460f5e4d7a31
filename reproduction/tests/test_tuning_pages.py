"""Pages of searches made by hand: what stays of a gain when both methods are tuned."""

import json

import pytest

from ownerwise.errors import OwnerwiseError
from ownerwise.wording import Amount
from ownerwise_reproduction import tuning, tuning_pages

COMMAND = "ownerwise experiments tune digits --method idp,ino --seeds 3 --trials 2"


def amounts(accuracy, strict):
    return {
        "accuracy": Amount(accuracy, 0.01, 2),
        "balanced_accuracy": Amount(accuracy, 0.01, 2),
        "worst_group": Amount(strict / 2, 0.02, 2),
        "strict": Amount(strict, 0.02, 2),
    }


def point(method, number, validation, test):
    values = {"training.lr": 0.5 * (number + 1)}
    return tuning.Point(method, number, values, amounts(*validation), amounts(*test), 30.0, ["abc"])


@pytest.fixture
def search(tmp_path):
    """IDP-SGD improves by tuning and chooses draw 1; INO-SGD stays with the first draw."""
    found = [
        point("ino", 0, (0.8, 0.7), (0.79, 0.7)),
        point("ino", 1, (0.7, 0.8), (0.7, 0.75)),
        point("idp", 0, (0.7, 0.2), (0.7, 0.3)),
        point("idp", 1, (0.9, 0.6), (0.9, 0.6)),
    ]
    tuning.write("digits", found, 2, range(3), COMMAND, tmp_path)
    (read,) = tuning_pages.read(tmp_path)
    assert list(read.points) == found
    return read


def test_the_remaining_share_of_a_gain(search):
    assert search.methods == ["idp", "ino"]
    kept = tuning_pages.kept(search, "ino", "accuracy", "strict")
    assert kept.fixed == pytest.approx(40.0)  # 0.7 - 0.3
    assert kept.tuned == pytest.approx(10.0)  # 0.7 - 0.6
    assert kept.share == pytest.approx(0.25)
    by_strict = tuning_pages.kept(search, "ino", "strict", "strict")
    assert by_strict.tuned == pytest.approx(15.0)  # INO-SGD chooses draw 1
    assert tuning_pages.Kept(-1.0, 2.0).share is None
    assert tuning_pages.Kept(1.0, -2.0).share is None


def test_the_page_says_what_remains_of_a_gain(search, tmp_path):
    written = tuning_pages.write_pages([search], tmp_path / "out")
    assert written == {"digits, with all methods tuned": "digits/tuning/index.md"}
    page = (tmp_path / "out" / "digits/tuning/index.md").read_text()
    assert (
        "At the first draw (lr 0.5), INO-SGD differs from IDP-SGD by +40.00 points of recall "
        "(strict owners); with both tuned for accuracy, by +10.00 points: 25% of the gain remains."
    ) in page
    assert "The first draw is the setting, unchanged." in page
    assert "mean and standard deviation over seeds 0, 1, 2" in page
    assert "| INO-SGD | the first draw | +9.00 | +9.00 | +40.00 | +20.00 |" in page
    assert "| INO-SGD | accuracy, held out | -11.00 | -11.00 | +10.00 | +5.00 |" in page
    everything = "accuracy, balanced accuracy, strict owners, worst group"
    assert f"| IDP-SGD | {everything} | lr 1 | 90.00 ± 1.00 |" in page
    first = "the first draw, accuracy, balanced accuracy"
    assert f"| INO-SGD | {first} | lr 0.5 | 79.00 ± 1.00 |" in page
    assert "NOT PRIVATE" in page
    assert f"    {COMMAND}\n    ownerwise experiments table --out reproduction/results\n" in page
    assert "2 min" in page  # four times 30 seconds
    assert "](frontier.svg)" in page
    assert (tmp_path / "out" / "digits/tuning/frontier.svg").exists()
    stored = json.loads((tmp_path / "out" / "digits/tuning/search.json").read_text())
    assert stored["methods"]["idp"]["points"][0]["plans"] == ["abc"]


def test_page_of_a_setting_with_changes_and_one_seed(search, tmp_path):
    command = f"{COMMAND} --profile short --set plan.steps=400"
    tuning.write("digits", search.points, 2, [7], command, tmp_path)
    (changed,) = tuning_pages.read(tmp_path)
    page = tuning_pages.page(changed)
    assert page.startswith("# digits (short profile, plan.steps=400), with all methods tuned\n")
    assert "The first draw is the setting, as in the heading." in page
    assert "measured on test records, one seed (7), in per cent" in page
    assert "with both tuned for accuracy, by +10.00 points.\n" in page
    assert "remains" not in page


def test_nothing_is_said_of_gains_without_a_baseline(tmp_path):
    tuning.write("digits", [point("ino", 0, (0.8, 0.7), (0.8, 0.7))], 1, [0], COMMAND, tmp_path)
    (alone,) = tuning_pages.read(tmp_path, ["digits"])
    assert "Before and after" not in tuning_pages.page(alone)
    assert tuning_pages.read(tmp_path, ["MN-PC"]) == []


def test_files_of_another_version_are_named(tmp_path):
    (tmp_path / "digits.json").write_text('{"methods": {"idp": {"points": [{"number": 0}]}}}')
    with pytest.raises(OwnerwiseError, match=r"digits\.json was not written by this version"):
        tuning_pages.read(tmp_path)
