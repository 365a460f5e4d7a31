"""The section about audits: one chart per group, and only audits of the run's own plan."""

from dataclasses import replace

import pytest

from ownerwise.audit import Audit, GroupAudit, Measured
from ownerwise.report import card_text, write_report
from ownerwise.report.audit_section import audit_section, audits_of
from ownerwise.report.blocks import Bullets, Table
from ownerwise.report.comparison import Comparison
from ownerwise.report.plots import Figure
from tools.report_tools import made_run

HOSTILE = "<img src=x onerror='broken()'>"


def audit(plan, attack="white-box", names=("ε = 1", "ε = 8"), auc=(0.6, 0.55, 0.65)):
    groups = [
        GroupAudit(name, 1.0, 1e-5, 50, Measured(*auc), 0.7, bounds={"any mechanism": 0.0})
        for name in names
    ]
    return Audit(attack, plan, 10, 0.05, groups, (), 20, private=True)


@pytest.fixture
def run(tmp_path):
    run = made_run()
    run.folder = tmp_path
    return run


def test_every_group_has_a_chart_with_all_attacks_and_caps(run):
    for attack in ("white-box", "loss"):
        audit(run.plan.hash, attack).save(run.folder)
    blocks = audit_section(Comparison.of([run])) or []
    (figure,) = [block for block in blocks if isinstance(block, Figure)]
    assert [panel.title for panel in figure.panels] == ["ε = 1", "ε = 8"]
    reached, caps = figure.panels[0].views["AUC"].traces
    assert reached["y"] == [0.6, 0.6]
    assert reached["error_y"]["array"] == [0.05, 0.05]
    assert caps["y"] == [0.7, 0.7]
    assert len([block for block in blocks if isinstance(block, Table)]) == 2
    findings = [block for block in blocks if isinstance(block, Bullets)]
    assert findings[0].items[0] == (
        "ε = 1: The attack does better than chance (AUC 0.6 (0.55 to 0.65); cap 0.7)."
    )


def test_an_audit_in_which_records_took_part_says_so_on_report_and_card(run):
    rates = {"detections at 1.0% false alarms": Measured(0.02, 0.011, 0.03)}
    (group,) = audit(run.plan.hash, names=("ε = 1",)).groups
    group = replace(
        group, bounds={}, rates=rates, rate_caps=dict.fromkeys(rates, 0.11111),
        rate_chances=dict.fromkeys(rates, 0.01),
    )  # fmt: skip
    Audit("LiRA", run.plan.hash, 10, 0.05, [group], of="records").save(run.folder)
    write_report([run], run.folder / "report.html")
    report, card = (run.folder / "report.html").read_text(), card_text(run)
    for text in (report, card):
        assert "NOT PRIVATE: records of people took part" in text
        assert "canaries" not in text
    assert "0.02 (0.011 to 0.03); at most 0.112" in report


def test_an_audit_of_another_plan_is_not_shown(run):
    audit("another").save(run.folder)
    assert audits_of(run) == []
    assert audit_section(Comparison.of([run])) is None
    assert "## Audit" not in card_text(run)


def test_failures_and_hostile_names_stand_on_report_and_card(run):
    made = audit(run.plan.hash, names=(HOSTILE,))
    Audit(made.attack, made.plan, 10, 0.05, made.groups, ("noise: variance",), 20).save(run.folder)
    write_report([run], run.folder / "report.html")
    report, card = (run.folder / "report.html").read_text(), card_text(run)
    assert '<section id="audit"' in report
    for text in (report, card):
        assert "A comparison with the plan FAILED: noise: variance" in text
        assert "An attack that fails proves nothing" in text
        assert HOSTILE not in text
