"""The list of sections: what mechanisms add to it, and that blocks hold plain text only."""

import pytest

import ownerwise as ow
from ownerwise.report import card_text, mechanism_sections, sections, write_report
from ownerwise.report.blocks import Bullets, Cell, Definitions, Notes, Section, Table, Text
from ownerwise.report.rendering import render_html, render_markdown
from ownerwise.report.sections import all_sections
from tools.report_tools import made_run, small_plan

HOSTILE = "<img src=x onerror='broken()'>\x07 {{ 7 * 7 }}"
SHOWN = "&lt;img src=x onerror=&#x27;broken()&#x27;&gt;\\x07 {{ 7 * 7 }}"


def added(monkeypatch, **section):
    monkeypatch.setattr(sections, "MECHANISM_SECTIONS", {"Mine": Section(**section)})


def test_mechanisms_stand_after_the_section_they_name():
    ids = [section.id for section in all_sections()]
    assert ids == [
        *(
            "overview",
            "predictions",
            "learning",
            "gain",
            "worst",
            "trade-off",
            "constraints",
            "budgets",
        ),
        *(
            "meaning",
            "adjustment",
            "statistics",
            "calibration",
            "importance",
            "audit",
            "plan",
            "limits",
            "provenance",
        ),
    ]


def test_a_mechanism_adds_a_section_in_which_names_stay_text(monkeypatch, tmp_path):
    blocks = [
        Text(HOSTILE),
        Bullets([HOSTILE]),
        Definitions({HOSTILE: HOSTILE}),
        Table(HOSTILE, [HOSTILE], [[HOSTILE], [Cell(HOSTILE, best=True)]]),
    ]
    added(monkeypatch, id="mine", link=HOSTILE, title=HOSTILE, build=lambda comparison: blocks)
    write_report([made_run()], tmp_path / "report.html")
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert '<section id="mine"' in document
    assert document.count(SHOWN) == 12
    assert HOSTILE not in document


@pytest.mark.parametrize(("reason", "listed"), [("no such runs.", True), ("", False)])
def test_a_missing_section_is_listed_if_there_is_a_reason(monkeypatch, tmp_path, reason, listed):
    added(
        monkeypatch, id="mine", link="Mine", title="My weights", build=lambda comparison: None,
        why_missing=lambda comparison: reason,
    )  # fmt: skip
    write_report([made_run()], tmp_path / "report.html")
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert ("<li>My weights: no such runs.</li>" in document) == listed
    assert 'id="mine"' not in document


def test_a_section_that_follows_no_section_is_refused(monkeypatch):
    added(monkeypatch, id="mine", link="", title="", build=lambda comparison: [], follows="plans")
    with pytest.raises(ow.OwnerwiseError, match="Mine follows 'plans'; expected follows= to be"):
        all_sections()


def test_a_mechanism_that_the_report_has_never_heard_of(tmp_path):
    """Its settings stand on report and card; nothing is said of tails, rates or histograms."""
    run = made_run(
        "Mine-SGD", plan=small_plan("uniform", release_std=20.0),
        weights={"kind": "Mine", "slope": 3}, clipping={"kind": "Own"},
        constraints={"kind": "Counts", "cells": [1, 2]},
    )  # fmt: skip
    for line in run.history:
        line["constraints"] = {"counts": [[1.0, 2.0]]}
        line["validation"]["constraints"] = {}
    write_report([run, made_run()], tmp_path / "report.html")
    document = (tmp_path / "report.html").read_text(encoding="utf-8")
    card = card_text(run)
    assert "Mine (slope 3)" in card
    for text in (document, card):
        assert "at every step, one sum over per-record vectors" in text
        for words in ("importance tail", "histogram of predictions", "Rate constraints"):
            assert words not in text
    assert 'id="constraints"' not in document


def test_a_mechanism_states_what_is_public_and_released(monkeypatch, tmp_path):
    notes = Notes(["the number of cells"], "one count of cells", {"Cells": HOSTILE})
    section = Section("mine", "", "", lambda comparison: None, notes=lambda run: notes)
    monkeypatch.setattr(mechanism_sections, "MECHANISM_SECTIONS", {"Mine": section})
    run = made_run(plan=small_plan("uniform", release_std=20.0))
    write_report([run], tmp_path / "report.html")
    document, card = (tmp_path / "report.html").read_text(encoding="utf-8"), card_text(run)
    for text in (document, card):
        assert "the number of cells" in text
        assert "at every step, one count of cells over per-record vectors" in text
    assert "| Cells | &lt;img" in card


def test_templates_refuse_values_that_were_not_passed():
    for render, template in ((render_html, "page.html"), (render_markdown, "card.md")):
        with pytest.raises(Exception, match="is undefined"):
            render(f"{template}.jinja")
