"""Pages, JSON and figures of results made by hand."""

import json
import xml.etree.ElementTree as ElementTree

import pytest
from made_results import result

from ownerwise.experiments import figures, summary, tables


@pytest.fixture
def study():
    (made,) = summary.studies(
        [
            result("idp", 0),
            result("idp", 1, (0.4, 0.4, 0.6, 0.8)),
            result("ino", 0, (0.5, 0.6, 0.6, 0.7)),
            result("ino", 1, (0.5, 0.5, 0.6, 0.8)),
            result("uniform", 0, (0.3, 0.3, 0.3, 0.3)),
        ]
    )
    return made


def test_table_of_all_methods(study):
    rows = [
        [cell.strip() for cell in row.strip("|").split("|")]
        for row in tables.overall_table(study).splitlines()
    ]
    assert rows[0][:5] == [
        "method", "accuracy", "balanced accuracy", "worst group", "strictest owner",
    ]  # fmt: skip
    assert rows[2][0] == "uniform"
    assert rows[2][1] == "30.00"  # one seed has no deviation
    # (0.5 + 0.55) / 2 and 0.05 / sqrt 2; (0.2 + 0.4) / 2 and 0.2 / sqrt 2
    assert rows[3][:4] == ["IDP-SGD", "52.50 ± 3.54", "52.50 ± 3.54", "30.00 ± 14.14"]
    assert rows[3][-2:] == ["2", "4.00"]


def test_pages_and_json(study, tmp_path):
    written = tables.write_tables([study], tmp_path, {"digits": [tmp_path / "picture.svg"]})
    assert [path.name for path in written] == ["README.md", "digits.md", "digits.json"]
    page = (tmp_path / "digits.md").read_text()
    assert "NOT PRIVATE" in page
    assert "- learning rate: between values of a scan" in page  # choices of ours are shown
    assert "| IDP-SGD | 30.00 ± 14.14 |" in page  # group a
    assert "10 (0.50)" in page  # its drop
    assert "![picture](picture.svg)" in page
    stored = json.loads((tmp_path / "digits.json").read_text())
    assert stored["methods"]["idp"]["metrics"]["accuracy"]["mean"] == pytest.approx(0.525)
    gain = stored["methods"]["ino"]["gain"]
    assert gain["by_group"]["a"] == pytest.approx(0.2)
    assert f"| INO-SGD | {gain['correlation']:.3f} |" in page
    assert stored["methods"]["idp"]["gain"] is None
    assert "[digits](digits.md)" in (tmp_path / "README.md").read_text()


def test_figures(study, tmp_path):
    written = figures.write_figures(study, tmp_path)
    assert [path.name for path in written] == [
        f"digits-{name}.svg" for name in ("owners", "overall", "gain", "trade-off")
    ]  # no classes within owners here
    contents = [path.read_bytes() for path in written]
    for content in contents:
        ElementTree.fromstring(content)
    assert [path.read_bytes() for path in figures.write_figures(study, tmp_path)] == contents


def test_figure_of_classes_within_owners():
    made = result()
    for line in made["history"]:
        line["classes"] = {
            group: {f"{group}{k}": {"recall": 0.5} for k in range(3)} for group in line["groups"]
        }
    (study,) = summary.studies([made])
    panels = figures.class_curves(study).get_axes()
    assert [len(panel.get_lines()) for panel in panels] == [3, 3, 3, 3]
    assert figures.gains(study) is None
    assert figures.trade_off(study) is None
