"""Methods against epsilon, where all owners have one budget."""

from made_results import result
from ownerwise_reproduction import budget_pages, summary


def run(epsilon, method, accuracy, seed=0, **changed):
    """A run of the IMDb setting in which all have `epsilon`."""
    made = result(method, seed, (accuracy,) * 4)
    changes = [] if epsilon == 1 else [f"owners.assignment.budgets=[{epsilon}]"]
    budgets = dict.fromkeys(made["budgets"], float(epsilon))
    gradients = {"evaluated": 50_000, "summed": 50_000 if method == "uniform" else 20_000}
    described = {"setting": "DPIS-IMDB", "changes": changes, "gradients": gradients}
    return made | described | {"budgets": budgets} | changed


def rows(text):
    cells = [
        line.removeprefix("| ").removesuffix(" |").split(" | ")
        for line in text.splitlines()
        if line.startswith("|")
    ]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in cells}


def test_studies_at_several_budgets_stand_side_by_side(tmp_path):
    studies = summary.studies(
        [
            run(4, "uniform", 0.7),
            run(1, "uniform", 0.6),
            run(1, "uniform", 0.62, seed=1),
            run(1, "dpis", 0.5),
            result("uniform"),  # of another setting
        ]
    )
    assert budget_pages.write_page(studies, tmp_path) == {budget_pages.TITLE: budget_pages.PAGE}
    text = (tmp_path / budget_pages.PAGE).read_text()
    found = rows(text)
    links = [f"../DPIS-IMDB/{variant}/index.md" for variant in ("paper", "budgets-4")]
    assert found["method"] == [f"[ε 1]({links[0]})", f"[ε 4]({links[1]})", "gradients"]
    assert found["uniform"] == ["61.00 ± 1.41", "70.00", "50 (50)"]
    assert found["dpis"] == ["50.00", "", "50 (20)"]
    assert found["DPIS, slides: DPIS"] == ["62.1", "70.2", ""]
    assert text.count("## DPIS-IMDB\n") == 1


def test_sections_without_runs_at_hand_are_kept(tmp_path):
    budget_pages.write_page(
        summary.studies([run(1, "uniform", 0.6), run(4, "dpis", 0.5)]), tmp_path
    )
    first = (tmp_path / budget_pages.PAGE).read_text()
    later = summary.studies([run(1, "nonprivate", 0.8, profile="short")])
    budget_pages.write_page(later, tmp_path)
    text = (tmp_path / budget_pages.PAGE).read_text()
    assert text.startswith(first.removesuffix("\n") + "\n\n## DPIS-IMDB (short profile)\n")
    budget_pages.write_page(summary.studies([run(1, "uniform", 0.7)]), tmp_path)
    text = (tmp_path / budget_pages.PAGE).read_text()
    assert rows(text.partition("(short profile)")[0])["uniform"] == ["70.00", "50 (50)"]
    assert "| 80.00 |" in text
    assert text.count("## ") == 2


def test_other_changes_and_profiles_stand_apart():
    studies = summary.studies(
        [
            run(1, "uniform", 0.6),
            run(1, "uniform", 0.6, profile="short"),
            run(4, "uniform", 0.6, changes=["owners.assignment.budgets=[4]", "training.lr=2"]),
        ]
    )
    found = budget_pages.families(studies)
    assert {heading: list(by_budget) for heading, by_budget in found.items()} == {
        "DPIS-IMDB": [1.0],
        "DPIS-IMDB (short profile)": [1.0],
        "DPIS-IMDB (training.lr=2)": [4.0],
    }


def test_nothing_is_written_without_such_studies(tmp_path):
    assert budget_pages.write_page(summary.studies([result()]), tmp_path) == {}
    assert not list(tmp_path.iterdir())
