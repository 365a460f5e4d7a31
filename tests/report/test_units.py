"""Next to every epsilon stands what it holds for: in reports, on cards and on the console."""

import html
import re

import numpy as np
import pytest

import ownerwise as ow
from ownerwise.cli.train import summary
from ownerwise.report import card_text, write_report
from tools.report_tools import evaluation, made_run

IDS = np.repeat(["ann", "ben", "eve", "kim"], 30)
BUDGETS = {"ann": 1.0, "ben": 2.0, "eve": 4.0, "kim": 8.0}
ONE_EACH = np.arange(60)
PLANS = {
    "record, one each": (ONE_EACH, {}),
    "record, many each": (IDS, {}),
    "owner": (IDS, {"unit": "owner", "batch_size": 2}),
    "owner by record": (IDS, {"unit": "owner", "sampling": "record"}),
    "uniform": (IDS, {"method": "uniform"}),
    "scale": (IDS, {"method": "scale", "unit": "owner", "batch_size": 2}),
    "calibrated": (IDS, {"calibration": ow.Calibration()}),
    "rdp": (IDS, {"accountant": "rdp"}),
}
UNIT = re.compile(r"\bper (owner|record)|\bone owner together|\bowner by the end|/(owner|record)\b")
VALUE = re.compile(r"(?:ε|[Ee]psilon)[^.,;:|\n]{0,40}?(?:\d|more than)")
DEFINITION = re.compile(r"\(ε, δ\)|exp ε|ε \+|ε of a single|ε below is")


@pytest.fixture(scope="module", params=PLANS)
def run(request):
    ids, options = PLANS[request.param]
    epsilon = BUDGETS if ids is IDS else dict(enumerate(np.geomspace(1, 8, 60).tolist()))
    owners = ow.Owners(ids, epsilon, delta=1e-5)
    plan = ow.plan(owners, **{"steps": 10, "batch_size": 6, **options})
    held_out = {"unprotected": 7, "in_plan": 3}
    return made_run(plan=plan, seed=None, budgets=BUDGETS, held_out_owners=held_out)


def sentences(text):
    """Split at the ends of sentences, but not within numbers."""
    return re.split(r"(?<=[.;:!])\s+|\n", text)


def lacking(blocks):
    """Return the sentences with a value of epsilon that do not say what it holds for."""
    return [
        sentence
        for block in blocks
        for sentence in sentences(block)
        if VALUE.search(sentence) and not UNIT.search(sentence) and not DEFINITION.search(sentence)
    ]


def headings_lacking(headings):
    return [text for text in headings if re.search(r"ε|[Ee]psilon", text) and not UNIT.search(text)]


def test_the_check_itself_finds_what_it_should():
    assert lacking(["The ε is 3.2.", "ε 2 to 8", "ε spent: 4 owners; epsilon up to 3"]) == [
        "The ε is 3.2.", "ε 2 to 8", "epsilon up to 3",
    ]  # fmt: skip
    assert not lacking(["ε 2 per owner", "For all records of one owner together, ε is up to 3."])
    assert headings_lacking(["ε spent", "ε spent per record", "owners"]) == ["ε spent"]


def page_parts(page):
    """Return the text blocks of a page, and the headings of its tables, tiles and figures."""
    body = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    parts = {}
    for tag in ("p", "li", "dt", "dd", "th", "td", "h3", "strong", "summary", "figcaption",
                "label", "button"):  # fmt: skip
        found = re.findall(rf"<{tag}\b[^>]*>(.*?)</{tag}>", body, flags=re.DOTALL)
        parts[tag] = [html.unescape(re.sub(r"<[^>]+>|\s+", " ", text)).strip() for text in found]
    parts["aria"] = [html.unescape(text) for text in re.findall(r'aria-label="([^"]*)"', body)]
    return parts


def test_in_the_report(run, tmp_path):
    write_report([run, made_run("INO-SGD", plan=run.plan, seed=None, budgets=BUDGETS)],
                 tmp_path / "report.html")  # fmt: skip
    parts = page_parts((tmp_path / "report.html").read_text())
    assert sum("ε" in text for texts in parts.values() for text in texts) > 20
    assert lacking(text for texts in parts.values() for text in texts) == []
    assert headings_lacking([*parts["th"], *parts["dt"]]) == []


def test_on_the_card(run):
    card = card_text(run).split("---\n")[2]
    lines = card.splitlines()
    tables = [at for at, line in enumerate(lines) if re.fullmatch(r"\|( --- \|)+", line)]
    headings = [cell.strip() for at in tables for cell in lines[at - 1].split("|")]
    assert sum("ε" in cell for cell in headings) >= 2
    assert headings_lacking(headings) == []
    assert lacking(lines) == []
    assert "this card says" not in card or re.search(r"says [\d.]+ per (owner|record)", card)


def test_on_the_console(run):
    described = run.plan.describe().splitlines()
    assert headings_lacking(re.split(r"\s{2,}", described[3])) == []
    assert described[3].count("/") == 2
    assert lacking(described) == []
    assert lacking("; ".join(summary(run)).split("; unit")) == []


def test_small_groups_and_single_owners_have_no_result_of_their_own():
    """Neither in the summary on the console nor in the progress bar is there a group."""
    run = made_run(seed=None)
    metrics = evaluation({"a": 0.0}, {"a": 1.0})
    run.history[-1]["validation"] = {**metrics, "worst_group": None, "spread": None, "groups": {}}
    assert "worst" not in summary(run)[0]
