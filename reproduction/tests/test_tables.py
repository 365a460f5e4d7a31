"""Pages, JSON and figures of results made by hand."""

import json
import xml.etree.ElementTree as ElementTree

import pytest

from made_results import result
from ownerwise_reproduction import claims, figures, settings, summary, tables


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


def test_a_study_gets_a_page_and_a_json_file(study, tmp_path):
    picture = figures.Picture(tmp_path / "picture.svg", "What is seen.")
    written = tables.write_tables([study], tmp_path, {"digits/paper": [picture]})
    places = [path.relative_to(tmp_path).as_posix() for path in written]
    assert places == ["README.md", "digits/paper/index.md", "digits/paper/runs.json"]
    page = (tmp_path / "digits/paper/index.md").read_text()
    assert "NOT PRIVATE" in page
    assert "- the learning rate is in the middle of the values" in page  # choices of ours are shown
    assert "| IDP-SGD | 30.00 ± 14.14 |" in page  # group a
    assert "10 to 10 (0.50)" in page  # its drop
    assert "What is seen.\n\n![picture](picture.svg)" in page
    assert "    ownerwise experiments run digits --method idp,ino --seeds 2\n" in page
    assert "    ownerwise experiments table --out reproduction/results\n" in page
    assert "| IDP-SGD | `0123456789ab` | yes | 0, 1 | 8.0 s | 9.0 s |" in page
    assert "Methods were run with different seeds" in page
    assert "Strict owners are those" in page
    for other in ("Changes to the setting", "validation records", "Plain SGD", "are not owners"):
        assert other not in page
    stored = json.loads((tmp_path / "digits/paper/runs.json").read_text())
    assert stored["methods"]["idp"]["metrics"]["accuracy"]["mean"] == pytest.approx(0.525)
    gain = stored["methods"]["ino"]["gain"]
    assert gain["by_group"]["a"] == pytest.approx(0.2)
    assert f"| INO-SGD | {gain['correlation']:.3f} |" in page
    assert stored["methods"]["idp"]["gain"] is None
    assert stored["methods"]["idp"]["plans"] == ["0123456789abcdef"]
    assert stored["methods"]["idp"]["wall_seconds"] == [9.0, 9.0]
    assert stored["commands"][0].endswith("--method uniform --seeds 1")
    assert "[digits](digits/paper/index.md)" in (tmp_path / "README.md").read_text()


def test_the_overview_lists_claims_other_pages_and_studies(study, tmp_path):
    claimed = claims.Claim("IDP-SGD", "Table 2", "it works", 50.0, "digits", "idp", "accuracy")
    written = tables.write_tables(
        [study],
        tmp_path,
        findings=claims.find([claimed], [study]),
        further={"Tuned": "digits/tuning/index.md"},
    )
    page = written[0].read_text()
    ours = "**52.50 ± 3.54 %** (+2.50), 2 seeds, [digits](digits/paper/index.md)"
    assert f"| reached | it works (IDP-SGD, Table 2) | same model | 50.00 % | {ours} |" in page
    assert "- [Tuned](digits/tuning/index.md)" in page
    assert page.index("Table 2") < page.index("digits/tuning/index.md") < page.index("## [digits]")
    assert written[1].name == "claims.json"
    (stored,) = json.loads(written[1].read_text())
    assert stored["claim"]["theirs"] == 50.0
    assert stored["ours"] == "52.50 ± 3.54 %"


def test_ablations_have_their_own_tables():
    (study,) = summary.studies(
        [result("idp"), result("ino"), result("ino-0.8", spec="ino:0.8", label="INO-SGD, tail 0.8")]
    )
    page = tables.page(study, tables.describe(study))
    before, _, after = page.partition("## Tail length")
    assert "INO-SGD, tail 0.8" not in before
    assert "| INO-SGD, tail 0.8 |" in after
    assert "tail 0.8" not in tables.overview([study])
    assert "ino:0.8" in page  # in the command


def test_a_page_names_the_changes_to_its_setting():
    (study,) = summary.studies([result(changes=["plan.steps=20"])])
    text = "Changes to the setting: `plan.steps=20`."
    page = tables.page(study, tables.describe(study))
    title = settings.setting("digits").title
    assert f"{title}. 4 owners; 20 steps.\n\n{text}\n" in page
    assert f"{title}.\n\n{text}\n" in tables.overview([study])
    assert "different seeds" not in page


def test_page_names_the_records_of_its_figures():
    (study,) = summary.studies([result(evaluated_on="validation")])
    page = tables.page(study, tables.describe(study))
    assert "initial drop and the figures over training use the validation records" in page


def test_page_with_methods_that_do_not_keep_budgets():
    (study,) = summary.studies(
        [
            result(),
            result("top", within_budgets=False),
            result("nonprivate", label="plain SGD", plans=[], within_budgets=False),
        ]
    )
    page = tables.page(study, tables.describe(study))
    assert "Plain SGD uses momentum 0.9 and its own learning rate, 0.1." in page
    assert "| top | `0123456789ab` | no | 0 |" in page
    assert "| plain SGD |  | not private | 0 |" in page


def test_a_single_strict_owner_is_listed_once():
    def only(budgets):
        (study,) = summary.studies([result(budgets=dict(zip("abcd", budgets, strict=True)))])
        return tables.page(study, tables.describe(study)) + tables.overview([study])

    assert "strict owners |" in only((1.0, 2.0, 3.0, 6.0))
    one = only((1.0, 3.0, 3.0, 3.0))
    assert "| strictest owner | spread |" in one
    assert "trict owners" not in one


@pytest.mark.parametrize(
    ("kind", "title", "drawn"),
    [("by_class", "a (ε 1)", "a, ε 1"), ("random_shares", "a", "a")],
)
def test_groups_with_one_budget_each_show_it(kind, title, drawn, tmp_path):
    config = {"owners": {"assignment": {"kind": kind}}}
    (study,) = summary.studies([result(config=config)])
    page = tables.page(study, tables.describe(study))
    assert page.count(f"| method | {title} | ") == 2  # recalls and drops
    assert ("groups are not owners" in page) == (kind == "random_shares")
    assert figures.owner_curves(study).get_axes()[0].get_title() == drawn
    captions = [one.caption for one in figures.write_figures(study, tmp_path)]
    assert any("owners" in caption for caption in captions) == (kind == "by_class")


def test_bands_are_deviations_of_a_sample(study):
    panels = figures.overall_curves(study).get_axes()
    (band, _) = panels[1].collections  # worst group at the end: 0.2 and 0.4 with IDP-SGD
    bounds = band.get_paths()[0].vertices
    heights = bounds[bounds[:, 0] == 20][:, 1]
    assert (min(heights), max(heights)) == pytest.approx((0.3 - 0.1 * 2**0.5, 0.3 + 0.1 * 2**0.5))
    (alone,) = summary.studies([result()])
    assert not figures.overall_curves(alone).get_axes()[1].collections


def test_figures_are_the_same_bytes_each_time(study, tmp_path):
    written = figures.write_figures(study, tmp_path)
    assert [one.path.relative_to(tmp_path).as_posix() for one in written] == [
        f"digits/paper/{name}.svg" for name in ("owners", "overall", "gain", "trade-off")
    ]  # no classes within owners here
    contents = [one.path.read_bytes() for one in written]
    for content in contents:
        ElementTree.fromstring(content)
    again = figures.write_figures(study, tmp_path)
    assert [one.path.read_bytes() for one in again] == contents


def test_trade_off_starts_at_the_baseline(study):
    lowered = result("lowered-0.4", 0, (0.3, 0.3, 0.4, 0.4), spec="lowered:0.4")
    (more,) = summary.studies([run for runs in study.methods.values() for run in runs] + [lowered])
    panel, balanced = figures.trade_off(more).get_axes()
    lines = {line.get_label(): line.get_xydata() for line in panel.get_lines()}
    assert lines["IDP-SGD"].tolist() == [lines["lowered budgets"][0].tolist()]
    assert lines["lowered budgets"][1] == pytest.approx([0.35, 0.05])
    assert lines["INO-SGD"][0].tolist() == lines["IDP-SGD"][0].tolist()
    star = panel.get_lines()[-1]
    assert star.get_marker() == "*"
    assert star.get_xydata()[0].tolist() == lines["INO-SGD"][1].tolist()
    assert balanced.get_xlabel() == "balanced accuracy"


def test_trade_off_of_methods_with_two_numbers(study):
    runs = [run for runs in study.methods.values() for run in runs]
    runs += [
        result(f"ino-budget-{k}-0.9", 0, (0.3, 0.3, 0.4, k / 10), spec=f"ino-budget:{k}/0.9")
        for k in (3, 2)
    ]
    (more,) = summary.studies(runs)
    panel, _ = figures.trade_off(more).get_axes()
    lines = {line.get_label(): line.get_xydata() for line in panel.get_lines()}
    found = [points for label, points in lines.items() if "budget" in label]
    assert [round(x, 3) for x, _ in found[0][-2:]] == [0.3, 0.325]  # by rising kappa


def test_worse_half_of_many_groups():
    made = result()
    names = [f"g{k}" for k in range(20)]
    for line in (*made["history"], made["final"]):
        line["groups"] = {
            name: {"recall": k / 20, "loss": 1.0, "records": 1} for k, name in enumerate(names)
        }
    (study,) = summary.studies([made | {"budgets": dict.fromkeys(names, 1.0)}])
    panels = figures.overall_curves(study).get_axes()
    assert panels[2].get_title() == "worse half of the groups"
    assert panels[2].get_lines()[0].get_ydata() == pytest.approx([0.225] * 3)  # mean of 0 to 9 / 20
    assert summary.over_seeds(study.methods["idp"])["worst_half"].mean == pytest.approx(0.225)


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


def test_gradients_are_shown_where_not_all_are_summed():
    all_summed = {"evaluated": 9000, "summed": 9000}
    results = [
        result("uniform", gradients=all_summed),
        result("idp"),  # from before gradients were counted
        result("dpis", gradients={"evaluated": 9000, "summed": 2500}),
    ]
    (mixed,) = summary.studies(results)
    text = tables.overall_table(mixed)
    assert "gradients, thousands (summed) |" in text
    assert "9.0 (9.0) |" in text
    assert "9.0 (2.5) |" in text
    (plain,) = summary.studies(results[:2])
    assert "gradients" not in tables.overall_table(plain)
