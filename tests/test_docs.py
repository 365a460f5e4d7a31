"""What the documentation shows runs, its links lead somewhere, and it says what the code says."""

import os
import re
import shlex
import subprocess
import sys
import tomllib
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest

import ownerwise as ow
from ownerwise.cli.main import main, make_parser
from ownerwise.config import (
    prepare_run,
    read_config,
)
from ownerwise.config.reading import make_config
from ownerwise.config.sections import SECTIONS
from ownerwise.data import ASSIGNMENTS
from ownerwise.report.guarantees import attacker_bound, attacker_words
from tools import pretrained_tools, text_tools
from tools.pages import generator

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
WEIGHTS = {"EfficientNetLite0": pretrained_tools, "MiniLM": text_tools}
"""Networks whose weights may be missing, and the tools that know whether they are installed."""
WITH_OTHER_TOOLS = ("other-tools", "fine-tune")
RUNNING = [DOCS / "getting-started.md", *sorted((DOCS / "how-to").glob("*.md"))]
FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
COMMAND = re.compile(r"^ {4,8}ownerwise (.+)$", re.MULTILINE)


def blocks(page: Path, kind: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text()) if found == kind]


def name(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.fixture
def as_in_the_repository(tmp_path, monkeypatch):
    """A scratch folder with the repository's examples."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", [p for p in RUNNING if blocks(p, "python")], ids=name)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, as_in_the_repository, capsys):
    names = {"__name__": "__main__"}
    for number, code in enumerate(blocks(page, "python"), 1):
        if any(network in code and not WEIGHTS[network].is_installed() for network in WEIGHTS):
            continue  # the weights are an extra
        with warnings.catch_warnings():
            if page.stem in WITH_OTHER_TOOLS:  # which have warnings of their own
                warnings.simplefilter("ignore")
            exec(compile(code, f"{page.name}, block {number}", "exec"), names)
    shown = re.sub(r"\s+", " ", capsys.readouterr().out)
    for text in blocks(page, "text"):
        for line in text.splitlines():
            assert re.sub(r"\s+", " ", line.strip()) in shown
    for card in as_in_the_repository.glob("*.md"):
        assert "**Private" in card.read_text()


def test_pages_say_when_a_run_is_not_private():
    for page in PAGES:
        if re.search(r"\bseed=(?!None)\w", "".join(blocks(page, "python"))):
            assert "NOT PRIVATE" in page.read_text(), page.name


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "toml")], ids=name)
def test_configurations_can_be_trained(page, as_in_the_repository):
    base = as_in_the_repository / "tables"
    base.mkdir()
    for path in (ROOT / "examples").glob("*.csv"):
        (base / path.name).symlink_to(path)
    visits = "".join(f"P{n % 100:04d},{n % 90},{60 + n % 50},home\n" for n in range(700))
    (base / "patient-visits.csv").write_text(f"patient,age,pulse,outcome\n{visits}")
    budgets = "".join(f"P{n:04d},{2 + n % 7}\n" for n in range(100))
    (base / "patient-budgets.csv").write_text(f"owner,epsilon\n{budgets}")
    for text in blocks(page, "toml"):
        prepared = prepare_run(make_config(tomllib.loads(text), base=base))
        assert prepared.plan.steps > 0
    assert not (as_in_the_repository / "runs").exists()


def shown_commands() -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *PAGES]
    found = [(page.name, line) for page in pages for line in COMMAND.findall(page.read_text())]
    return [(page, line) for page, line in found if not line.startswith("experiments ")]


@pytest.mark.parametrize(("page", "line"), shown_commands())
def test_commands_that_are_shown_are_known(page, line, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = shlex.split(line.partition("#")[0])
    options = make_parser().parse_args(words)
    if words[0] == "train" and Path(words[1]).exists():
        read_config(options.config, options.changes)
    if words[0] == "plan":
        assert Path(words[1]).exists()


def test_links_lead_somewhere():
    for page in [ROOT / "README.md", *PAGES]:
        for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
            if "://" in target or target.startswith("#"):
                continue
            assert (page.parent / target.partition("#")[0]).exists(), f"{name(page)}: {target}"


def test_the_command_reference_has_the_help_of_every_command(capsys):
    """Whatever commands there are: the list itself comes from the parser's own help."""
    page = "".join(generator().commands().split())  # lines may break inside hyphenated words

    def check(words: list[str]) -> None:
        with pytest.raises(SystemExit):
            main([*words, "--help"])
        text = capsys.readouterr().out
        assert "".join(text.split()) in page, words
        inner = re.search(r"^  (?:COMMAND|ACTION)\n((?:    .*\n)+)", text, re.MULTILINE)
        for command in re.findall(r"^ {4}(\w\S*)", inner[1] if inner else "", re.MULTILINE):
            check([*words, command])

    check([])
    assert page.count("usage:ownerwise") >= 5
    assert "<!-- generated: commands -->" in (DOCS / "command-line.md").read_text()


def table_under(page: Path, heading: str) -> dict[str, str]:
    """{first cell without marks: second cell} of the tables under a heading."""
    section = re.search(rf"^{re.escape(heading)}$(.*?)(?=^## |\Z)", page.read_text(), re.M | re.S)
    rows = re.sub(r"^\|.*\n\|---.*\n", "", section[1], flags=re.MULTILINE)  # without headings
    return dict(re.findall(r"^\| `?([^`|]+?)`? \| (.*?) \|", rows, re.MULTILINE))


@pytest.mark.parametrize("section", SECTIONS)
def test_the_configuration_page_names_every_key_with_its_value_and_meaning(section, tmp_path):
    source = SimpleNamespace(file=SimpleNamespace(src_uri="configuration.md"))
    page = tmp_path / "configuration.md"
    text = (DOCS / page.name).read_text()
    page.write_text(generator().on_page_markdown(text, source))
    shown = table_under(page, f"## [{section}]")
    if section == "owners":
        for kind in ("by_class", "by_classes"):
            assert re.findall(r"`(\w+)`", shown.pop(kind)) == list(ASSIGNMENTS.options(kind))
    assert shown == {key: rule.expected for key, rule in SECTIONS[section].items()}
    assert all(rule.meaning for rule in SECTIONS[section].values())


def test_the_odds_are_those_of_the_report():
    shown = table_under(DOCS / "concepts.md", "## What a budget means")
    assert len(shown) >= 5
    for epsilon, words in shown.items():
        assert words == attacker_words(attacker_bound(float(epsilon), 1e-5))


def test_every_pitfall_is_told_once_and_its_tests_exist():
    text = (DOCS / "pitfalls.md").read_text()
    entries = re.findall(
        r"^### (\d+)\. [^\n]+ \{ #pitfall-(\d+) \}\n(.*?)(?=^##|\Z)", text, re.M | re.S
    )
    assert sorted(int(number) for number, _, _ in entries) == [
        *range(1, 35),
        43,
        *range(47, 52),
        57,
        58,
        61,
        62,
        *range(65, 69),
    ]
    for number, anchor, body in entries:
        assert number == anchor
        assert all(f"*{part}:*" in body for part in ("Elsewhere", "Here", "Test")), number
        tests = re.findall(r"`(tests/[\w/]+\.py)::(?:\w+::)?(\w+)`", body)
        assert tests, f"{number} names no test"
        for file, test in tests:
            assert re.search(rf"def {test}\(", (ROOT / file).read_text()), f"{file}::{test}"
    ranks = re.findall(r"^\| (critical|theoretical|negligible) \| (.*) \|", text, re.MULTILINE)
    for rank, numbers in ranks:
        section = re.search(rf"^## {rank.capitalize()}$(.*?)(?=^## |\Z)", text, re.M | re.S)[1]
        assert re.findall(r"#pitfall-(\d+)\)", numbers) == re.findall(
            r"{ #pitfall-(\d+) }", section
        )


def test_every_attack_names_a_test_file_and_every_file_of_attacks_is_named():
    named = set(
        re.findall(r"`((?:tests/[\w/]+/)?test_\w+\.py)`", (DOCS / "security.md").read_text())
    )
    paths = {name if "/" in name else f"tests/attacks/{name}" for name in named}
    assert all((ROOT / path).is_file() for path in paths)
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests/attacks").glob("test_*.py")}
    assert files <= paths


def test_every_public_name_is_in_the_reference():
    text = "".join(page.read_text() for page in (DOCS / "api").glob("*.md"))
    missing = [
        public
        for public in ow.__all__
        if not re.search(rf"^::: ownerwise\.(\w+\.)*{public}\b", text, re.MULTILINE)
    ]
    assert missing == []


def test_every_module_is_listed():
    text = generator().modules()
    for path in (ROOT / "src" / "ownerwise").rglob("*.py"):
        if path.name != "__init__.py":
            assert re.search(rf"^\| `{path.name}` \| \S", text, re.MULTILINE), path.name


def test_the_site_is_built_without_warnings_and_needs_no_network(tmp_path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", tmp_path / "site"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert built.returncode == 0, built.stderr
    assert "WARNING" not in built.stderr
    pages = list((tmp_path / "site").rglob("*.html"))
    assert len(pages) > len(PAGES)
    for page in pages:
        html = page.read_text()
        loaded = re.findall(r"<(?:script|img|iframe)[^>]* src=\"?([^\s\">]+)", html)
        loaded += re.findall(r"<link[^>]* rel=\"?(?:stylesheet|preconnect|icon)[^>]*>", html)
        remote = [source for source in loaded if "//" in source and not source.startswith("data:")]
        assert not remote, page.name
        assert "<!-- generated" not in html
        assert not re.search(r"<code>\w+,</code>", html), "names that share a line of a docstring"
    commands = (tmp_path / "site" / "command-line.html").read_text()
    assert "--noise-multiplier" in commands
    assert "examples.html#own_loop.py" in (tmp_path / "site" / "how-to/own-loop.html").read_text()
