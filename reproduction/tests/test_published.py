"""Pages written earlier: what stays when other studies are written to the same folder."""

from dataclasses import replace
from pathlib import Path

import pytest

from made_results import result
from ownerwise_reproduction import claims, published, summary, tables

RESULTS = Path(__file__).parents[1] / "results"
CLAIM = claims.Claim("Paper", "Table 1", "a claim", 50.0, "digits", "idp", "accuracy")
OTHER = replace(CLAIM, claim="another claim", changes=("plan.steps=3",))


def write(folder, changes, further):
    """Write a study of one run as `table` does; return the names of the studies in the overview."""
    studies = summary.studies([result(changes=changes)])
    earlier = published.read(folder).without([study.name for study in studies])
    findings = earlier.completed(claims.find([CLAIM, OTHER], studies))
    tables.write_tables(
        studies,
        folder,
        findings=findings,
        further={**earlier.further, **further},
        earlier=earlier.sections,
    )
    return list(published.read(folder).sections), findings


def test_studies_and_claims_whose_runs_are_gone_are_kept(tmp_path):
    assert published.read(tmp_path) == published.Published()
    names, findings = write(tmp_path, [], {"A page": "page.md"})
    assert names == ["digits/paper"]
    assert [finding.study for finding in findings] == ["digits/paper", None]
    before = (tmp_path / "digits/paper/index.md").read_text()

    names, findings = write(tmp_path, ["plan.steps=3"], {"Another page": "other.md"})
    assert names == ["digits/paper", "digits/steps-3"]
    assert [finding.study for finding in findings] == ["digits/paper", "digits/steps-3"]
    overview = (tmp_path / "README.md").read_text()
    assert "2 claims were tested" in overview
    assert "- [A page](page.md)\n- [Another page](other.md)" in overview
    assert (tmp_path / "digits/paper/index.md").read_text() == before

    assert write(tmp_path, [], {}) == (names, findings)  # written anew, not twice
    assert (tmp_path / "README.md").read_text() == overview


def test_a_claim_that_was_added_later_takes_what_is_published_on_the_same_measurement(tmp_path):
    write(tmp_path, [], {})
    known = published.read(tmp_path)
    later = replace(CLAIM, where="Table 2", theirs=70.0, deviation=2.0)
    another = replace(later, method="ino")
    in_words = replace(later, theirs="more")
    new, *others = known.completed(claims.find([later, another, in_words], []))
    (old,) = (one for one in known.findings if one.claim == CLAIM)
    assert (new.study, new.ours, new.seeds) == (old.study, old.ours, old.seeds)
    assert new.theirs == "70.00 ± 2.00 %"
    assert old.distance is not None
    assert new.distance == pytest.approx(old.distance - 20.0)
    assert (old.verdict, new.verdict) == ("reached", "not reached")
    assert [one.study for one in others] == [None, None]


def test_a_study_whose_pages_were_deleted_is_not_kept(tmp_path):
    write(tmp_path, [], {})
    (tmp_path / "digits/paper/runs.json").unlink()
    found = published.read(tmp_path)
    assert not found.sections
    assert not found.findings


def test_the_published_overview_follows_from_its_parts():
    """README.md agrees with claims.json and claims.toml, and nothing in it would be lost."""
    found = published.read(RESULTS)
    findings = found.completed(claims.find(claims.read(), []))
    overview = tables.overview([], findings, found.further, found.sections)
    assert overview == (RESULTS / "README.md").read_text(encoding="utf-8")


def test_the_overview_links_every_page_in_the_results_folder():
    overview = (RESULTS / "README.md").read_text(encoding="utf-8")
    pages = {path.relative_to(RESULTS).as_posix() for path in RESULTS.rglob("index.md")}
    assert len(pages) > 50
    assert {page for page in pages if f"]({page})" not in overview} == set()
