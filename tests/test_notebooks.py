"""Every notebook runs from top to bottom in a real kernel and reaches the results it speaks of."""

import json
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tools.pages import generator

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
REACHED = {
    "1-first-private-model": """
assert accuracy > 0.8 and accuracy > accuracy_strictest + 0.05
assert run.private and (plan.epsilon() > 0.99 * owners.epsilon).all()
assert plan.noise_std < strictest.noise_std / 2
assert len(problems) == 1 and "BatchNorm" in str(problems[0])
""",
    "2-budgets-from-a-file": """
assert last["accuracy"] > 0.75 and run.private
assert len(problems) == 4 and any("northfield" in problem for problem in problems)
assert (plan.owner_epsilon() > 3 * plan.epsilon()).all()
assert per_person.unit == "owner"
""",
    "3-budgets-and-owners": """
uniform, idp, calibrated = results.values()
assert idp.mean() > uniform.mean() + 0.1
assert calibrated[:5].mean() > idp[:5].mean() - 0.02  # by chance, fails once in 3,000
assert pull[0] < pull[-1] / 5
""",
    "4-read-and-check-a-report": """
assert run.private and not repeatable.private
assert len(refused) == 2 and "hash" in refused[0] and "dp-accounting" in refused[1]
assert body.startswith("# Privacy card") and "Private per RECORD" in body
assert (folder / "report.html").stat().st_size > 10_000
""",
}
"""What must hold after a notebook's last cell."""


def test_every_notebook_has_results_that_are_checked():
    assert [path.stem for path in NOTEBOOKS] == list(REACHED)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")
def test_a_notebook_runs_and_reaches_its_results(path):
    notebook = nbformat.read(path, 4)
    notebook.cells.append(nbformat.v4.new_code_cell(REACHED[path.stem]))
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": path.parent}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_complete_and_name_no_folder_of_their_author(path):
    cells = json.loads(path.read_text())["cells"]
    counts = [cell["execution_count"] for cell in cells if cell["cell_type"] == "code"]
    assert counts == list(range(1, len(counts) + 1))
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert outputs
    assert all(output["output_type"] != "error" for output in outputs)
    assert not re.search(r"/(tmp|home|root|work|var|usr)/", json.dumps(outputs))


@pytest.mark.parametrize("number", range(1, 5))
def test_the_site_shows_a_notebook_with_its_outputs(number):
    page = generator().notebook(number)
    assert page.startswith("# ")
    assert page.count("```text") >= 2
    assert ".ipynb" not in page
    assert "](../docs/" not in page
    assert number != 3 or "data:image/png" in page
