"""Every number on a report's first screen follows from the raw files of its run folders.

The files are read with json, sqlite3 and safetensors alone, and epsilons are computed with
dp-accounting, so that nothing of the library is trusted.
"""

import html
import json
import math
import re
import sqlite3

import dp_accounting as dp
import numpy as np
import pytest
from dp_accounting.pld import PLDAccountant
from safetensors.numpy import load_file
from scipy import stats

import ownerwise as ow
from ownerwise.runs import Run
from tools.step_tools import one_thread

one_thread = pytest.fixture(autouse=True)(one_thread)

RECORDS, STEPS = {"strict": 60, "middle": 90, "lax": 150}, 8
BUDGETS = {"strict": 1.0, "middle": 3.0, "lax": 8.0}
NUMBER = re.compile(r"[+−]?\d[\d,]*(?:\.\d+)?(?:e-\d+)?%?")


def trained(folder, label, *, seed=None, weights=None):
    """Train a run with this folder; the wards are the groups, and everyone has one record."""
    rng = np.random.default_rng(seed)
    wards = np.repeat(list(RECORDS), list(RECORDS.values()))
    inputs = rng.normal(size=(600, 4)).astype("float32")
    labels = (inputs[:, 0] + 0.5 * rng.normal(size=600) > 0.2).astype("int64")
    owners = ow.Owners(np.arange(300), np.array([BUDGETS[ward] for ward in wards]), 1e-5)
    plan = ow.plan(owners, "sample", steps=STEPS, batch_size=40)
    import torch

    trainer = ow.Trainer(
        torch.nn.Linear(4, 2), plan, lr=0.5, folder=folder, seed=seed, label=label, weights=weights,
        evaluate_every=4, progress=False,
    )  # fmt: skip
    return trainer.fit(
        (inputs[:300], labels[:300]),
        validation=(inputs[300:], labels[300:]),
        validation_groups=np.resize(["left", "right", "right"], 300),
    )


class Raw:
    """The raw files of a run folder."""

    def __init__(self, folder):
        self.config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        self.plan = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
        self.arrays = load_file(folder / "plan.safetensors")
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        self.last = json.loads(lines[-1])["validation"]
        with sqlite3.connect(folder / "account.db") as account:
            events = account.execute("SELECT kind, first, steps FROM events").fetchall()
        reserved = [first + count for kind, first, count in events if kind == "reserve"]
        returned = [first for kind, first, _ in events if kind == "return"]
        self.steps = min([max(reserved), *returned[-1:]])

    def epsilon(self, owner):
        accountant = PLDAccountant(value_discretization_interval=1e-4)
        rate = float(self.arrays["sampling_rates"][owner])
        multiplier = self.plan["noise_std"] / float(self.arrays["clip_norms"][owner])
        step = dp.PoissonSampledDpEvent(rate, dp.GaussianDpEvent(multiplier))
        return accountant.compose(step, self.steps).get_epsilon(float(self.arrays["deltas"][owner]))


def words_of(markup):
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", markup)).split())


class Screen:
    """The first screen of a report: the section "At a glance"."""

    def __init__(self, path):
        document = path.read_text(encoding="utf-8")
        section = document.split('<section id="overview"')[1].split("</section>")[0]
        tiles = re.findall(r'class="tile"><dt>(.*?)</dt><dd>(.*?)<small>(.*?)</small>', section)
        self.tiles = {
            words_of(name): (words_of(value), words_of(note)) for name, value, note in tiles
        }
        self.lead = words_of(re.search(r'<p class="lead">(.*?)</p>', section)[1])
        self.banner = words_of(re.search(r'<div class="banner.*?</div>', section, re.DOTALL)[0])
        self.findings = [words_of(li) for li in re.findall(r"<li>(.*?)</li>", section)]
        rows = re.findall(r"<tr>(.*?)</tr>", section.split("<tbody>")[1], re.DOTALL)
        self.rows = [
            [words_of(cell) for cell in re.findall(r"<t[hd].*?>(.*?)</t[hd]>", row)] for row in rows
        ]
        self.words = words_of(section)


def percent(share):
    return f"{100 * share:.1f}%"


def signed(share):
    return f"{100 * share:+.1f} points".replace("-", "−")


def test_every_number_of_a_private_run(tmp_path):
    run = trained(tmp_path / "run", "IDP-SGD")
    run.report(tmp_path / "report.html")
    raw, screen = Raw(tmp_path / "run"), Screen(tmp_path / "report.html")
    targets, last = raw.arrays["targets"], raw.last
    shown = set(NUMBER.findall(screen.words.replace(screen.lead, "")))

    assert raw.config["seed"] is None
    assert screen.banner.startswith("Private Each training record")
    assert f"ε {targets.min():g} to {targets.max():g} per record at δ 1e-5" in screen.banner
    owners = f"{len(targets)}"
    assert (
        f"{owners} owners with {int(raw.arrays['records'].sum())} declared records" in screen.lead
    )

    # Epsilons: never below the reference, and at most 0.3% above it.
    value, note = screen.tiles["ε spent per record"]
    low, high = map(float, value.split(" to "))
    ends = [raw.epsilon(int(targets.argmin())), raw.epsilon(int(targets.argmax()))]
    for stated, exact, budget in zip((low, high), ends, (1.0, 8.0), strict=True):
        assert exact * (1 - 1e-4) <= stated <= min(exact * 1.003, budget)
    share = float(re.search(r"at most ([\d.]+)% of a budget", note)[1]) / 100
    assert max(low / 1.0, high / 8.0) - 2e-4 <= share <= 1
    assert note.endswith(f"after {raw.steps} of {raw.plan['schedule'][0][0]} steps")
    assert raw.steps == STEPS
    known = {*NUMBER.findall(f"{value} {note}"), "1", "8", "1e-5", owners}

    # Metrics.
    recalls = {name: group["recall"] for name, group in last["groups"].items()}
    expected = {
        "overall accuracy": percent(last["accuracy"]),
        "worst group": percent(min(recalls.values())),
    }
    for name, words in expected.items():
        assert screen.tiles[name][0] == words
    found = last["classification"]
    always = percent(found["majority"]["share"])
    assert screen.tiles["overall accuracy"][1].endswith(f"“{found['majority']['class']}”: {always}")
    area = {key: f"{found['auc'][key]:.3f}" for key in ("value", "low", "high")}
    value, note = screen.tiles["area under the ROC curve"]
    assert value == area["value"]
    assert f"{area['low']} to {area['high']}" in note
    cells = [last["accuracy"], last["balanced_accuracy"], min(recalls.values())]
    cells.append(float(np.std(list(recalls.values()))))
    table = ["IDP-SGD", "1", *(f"{100 * cell:.1f}" for cell in cells)]
    assert screen.rows == [table]
    known |= {*expected.values(), always, *area.values(), *table[1:]}
    known |= {found["majority"]["class"], "95%", "0.5", "0"}
    assert shown - known == set()


@pytest.mark.filterwarnings("ignore:this process has already trained:ownerwise.PrivacyWarning")
def test_every_number_of_a_comparison(tmp_path):
    for seed in (1, 2, 3):
        trained(tmp_path / f"idp-{seed}", "IDP-SGD", seed=seed)
        trained(tmp_path / f"ino-{seed}", "INO-SGD", seed=seed, weights=ow.INO())
    folders = {m: [tmp_path / f"{m}-{seed}" for seed in (1, 2, 3)] for m in ("idp", "ino")}
    runs = [Run.load(folder) for of_method in folders.values() for folder in of_method]
    runs[0].report(tmp_path / "report.html", *runs[1:])
    screen = Screen(tmp_path / "report.html")
    assert screen.banner.startswith("NOT PRIVATE")
    assert "fixed seeds (1, 2, 3)" in screen.banner
    values = {}
    for name, of_method in folders.items():
        last = [Raw(folder).last for folder in of_method]
        spread = [np.std([g["recall"] for g in each["groups"].values()]) for each in last]
        values[name] = {
            "overall accuracy": [each["accuracy"] for each in last],
            "balanced accuracy": [each["balanced_accuracy"] for each in last],
            "worst group": [min(g["recall"] for g in each["groups"].values()) for each in last],
            "spread": spread,
        }
        row = [
            f"{100 * np.mean(v):.1f} ± {100 * np.std(v, ddof=1):.1f}" for v in values[name].values()
        ]
        shown = next(row for row in screen.rows if row[0].startswith(name.upper()))
        assert [cell.removeprefix("★ ").removeprefix("★") for cell in shown[2:]] == row
    (finding,) = [words for words in screen.findings if words.startswith("INO-SGD vs IDP-SGD.")]
    for metric in values["ino"]:
        mine, theirs = values["ino"][metric], values["idp"][metric]
        by = np.mean(mine) - np.mean(theirs)
        error = 2 * math.sqrt(stats.sem(mine) ** 2 + stats.sem(theirs) ** 2)
        low, high = (f"{100 * end:.1f}".replace("-", "−") for end in (by - error, by + error))
        zero = not round(1000 * by)
        words = f"{'0.0 points' if zero else signed(by)} ({low} to {high})"
        assert f"{metric} {words}" in finding
        clear = not zero and abs(by) > error
        better = (by > 0) == (metric != "spread")
        verdict = ("gained" if better else "lost") if clear else "within chance"
        if metric in screen.tiles:
            value, note = screen.tiles[metric]
            assert value == percent(np.mean(mine))
            assert f"INO-SGD; {words} vs IDP-SGD: {verdict}" in note
