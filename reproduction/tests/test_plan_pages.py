"""Plans by both accountants, and budgets over the steps."""

import json
from importlib.resources import files

import numpy as np
import pytest

from ownerwise_reproduction import plan_pages, settings


@pytest.fixture(scope="module")
def planned():
    """The digits with few steps, under the name of the setting that is shown."""
    text = (files("ownerwise_reproduction") / "catalogue" / "digits.toml").read_text()
    setting = settings.make_setting(plan_pages.SHOWN, text.replace("steps = 60", "steps = 20"))
    return plan_pages.make_plans(setting)


def test_what_the_strictest_owner_gets(planned):
    rows = {(row.method, row.accountant): row for row in planned.rows()}
    assert len(rows) == 6
    assert [row.method for row in rows.values() if row.own] == ["sample", "sample"]
    assert all(row.epsilon == 0.5 for row in rows.values())
    for method in plan_pages.METHODS:
        tight, loose = rows[method, "pld"], rows[method, "rdp"]
        assert tight.noise_std < loose.noise_std
        assert tight.hash != loose.hash
    rate = 128 / planned.plans["uniform", "pld"].records.sum()
    assert rows["uniform", "pld"].sampling_rate == pytest.approx(rate)
    assert rows["scale", "pld"].sampling_rate == pytest.approx(rate)
    assert rows["sample", "pld"].sampling_rate < rate
    assert rows["sample", "pld"].clip_norm == 1.0
    assert rows["scale", "pld"].clip_norm < 1.0
    assert 0.99 < rows["sample", "pld"].least_spent <= 1
    assert rows["uniform", "pld"].least_spent < 0.2  # of epsilon 5, 0.5 and little more are spent


def test_budgets_are_used_up_together(planned):
    panels = plan_pages.spending_figure(planned).get_axes()
    assert [panel.get_title() for panel in panels] == ["sample", "scale"]
    for panel in panels:
        lines = panel.get_lines()
        assert [line.get_label() for line in lines[:-1]] == [
            f"ε {epsilon}" for epsilon in ("0.5", "2", "3.5", "5")
        ]
        for line, budget in zip(lines, (0.5, 2.0, 3.5, 5.0, 0.5), strict=True):
            spent = np.array(line.get_ydata())
            assert (np.diff(spent) >= 0).all()
            assert spent[0] == 0
            assert spent[-1] == pytest.approx(budget, rel=0.01)
            assert spent[-1] <= budget


def test_page(planned, tmp_path):
    written = plan_pages.write_page([planned], tmp_path, "ownerwise experiments plans --out x")
    places = [path.relative_to(tmp_path).as_posix() for path in written]
    assert places == ["plans/index.md", "plans/plans.json", "plans/spending.svg"]
    page = written[0].read_text()
    rows = [line for line in page.splitlines() if line.startswith(f"| {plan_pages.SHOWN}")]
    assert [row.split(" | ")[1] for row in rows] == ["uniform", "sample *", "scale"]
    assert all("| -" in row for row in rows)  # PLD needs less noise
    assert f"]({written[2].name})" in page
    assert "    ownerwise experiments plans --out x" in page
    stored = json.loads(written[1].read_text())
    assert len(stored["plans"]) == 6
    assert stored["plans"][0]["hash"] == planned.plans["uniform", "pld"].hash
    bare = plan_pages.write_page([planned], tmp_path / "bare", "x", figures=False)
    assert "![" not in bare[0].read_text()
