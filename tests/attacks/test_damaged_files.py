"""Damaged files of a run: a sentence, never a traceback, and never a lower epsilon."""

import json
import shutil
from pathlib import Path

import pytest

import ownerwise as ow
from ownerwise.runs import Run
from tools import step_tools
from tools import training_tools as tools

_one_thread = pytest.fixture(autouse=True)(step_tools.one_thread)

FILES = (
    "config.json", "plan.json", "plan.safetensors", "history.jsonl", "environment.json",
    "account.db", "checkpoint-00000012.safetensors", "checkpoint-00000008.safetensors",
)  # fmt: skip
WRONG = (
    None, True, -1, 0.5, 10**400, "", "\ud800", [], {}, [[]], {"a": {}}, float("nan"),
    float("-inf"), "x" * 10_000,
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    trainer = tools.make_trainer(folder=folder, seed=None, weights=ow.INO())
    trainer.fit(tools.data(), **tools.validation(), test=tools.data())
    return folder


@pytest.fixture
def copy(folder, tmp_path, monkeypatch):
    """A copy of the run; its plan, unless it is the damaged file, is loaded once."""
    plan, load = ow.Plan.load(folder / "plan.json"), ow.Plan.load
    original = (folder / "plan.json").read_bytes(), (folder / "plan.safetensors").read_bytes()

    def quick(path, owners=None):
        files = path, path.with_suffix(".safetensors")
        found = tuple(file.read_bytes() for file in files if file.is_file())
        return plan if found == original else load(path, owners)

    monkeypatch.setattr(ow.Plan, "load", quick)
    return Path(shutil.copytree(folder, tmp_path / "run"))


def check(folder: Path, whole: Run) -> str:
    """Load a damaged folder; return what happened."""
    try:
        run = Run.load(folder)
        run.state_dict()
    except ow.OwnerwiseError as error:
        return "refused" if error.problems else "without a reason"
    assert run.steps_spent >= whole.steps_spent
    assert (run.epsilon() >= whole.epsilon()).all()
    return "reported" if run.problems else "read"


def check_bytes(folder: Path, name: str, contents) -> set[str]:
    whole, path = Run.load(folder), folder / name
    before = path.read_bytes()
    found = set()
    for content in contents(before):
        path.write_bytes(content)
        found.add(check(folder, whole))
        path.write_bytes(before)
    assert found <= {"read", "reported", "refused"}
    return found


def truncated(step):
    return lambda content: (content[:at] for at in range(0, len(content), step(len(content))))


def flipped(step):
    def contents(content):
        for at in range(0, len(content), step(len(content))):
            yield content[:at] + bytes([content[at] ^ 0x41]) + content[at + 1 :]

    return contents


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncated, flipped])
def test_a_file_cut_or_changed_at_some_byte(copy, name, damage):
    found = check_bytes(copy, name, damage(lambda size: size // 23 + 1))
    # a cut line is dropped as after a kill, and the older checkpoint is a reserve
    unseen = (name == "history.jsonl" and damage is truncated) or name.endswith("8.safetensors")
    assert unseen or found & {"refused", "reported"}


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", [truncated, flipped])
def test_a_file_cut_or_changed_at_every_byte(copy, name, damage):
    check_bytes(copy, name, damage(lambda size: 1))


def places(content, place=()):
    """Every place in nested JSON."""
    inside = content.items() if isinstance(content, dict) else enumerate(content)
    for name, value in inside:
        yield (*place, name)
        if isinstance(value, dict | list):
            yield from places(value, (*place, name))


def replaced(content, place, value):
    """Return a copy of nested JSON with another value in one place; without it for `places`."""
    changed = json.loads(json.dumps(content))
    inner = changed
    for name in place[:-1]:
        inner = inner[name]
    if value is places:
        del inner[place[-1]]
    else:
        inner[place[-1]] = value
    return changed


def json_texts(content: bytes):
    """Yield a JSON file, or the first line of a history, with every field changed in every way."""
    first, _, rest = (
        content.partition(b"\n") if content.startswith(b'{"step') else (content, b"", b"")
    )
    stored = json.loads(first)
    for place in places(stored):
        for value in (places, *WRONG):
            text = json.dumps(replaced(stored, place, value)).encode()
            yield text + (b"\n" + rest if rest else b"")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES[:2] + FILES[3:5])
def test_every_field_of_every_json_file(copy, name):
    found = check_bytes(copy, name, json_texts)
    assert "refused" in found or "reported" in found


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", FILES)
def test_foreign_content(copy, name):
    contents = [
        b"", b"\0" * 4096, b"[" * 100_000, b'{"a":' * 100_000, b"[" * 300 + b"]" * 300 + b"\n",
        b'{"a": ' * 60 + b"1" + b"}" * 60 + b"\n", b"\xff\xfe\n", b"[1]\n", b"null\n", b'"text"\n',
        b"1" * 10_000 + b"\n", b'{"format": 1, "run_format": 1}\n',
    ]  # fmt: skip
    check_bytes(copy, name, lambda before: contents)
    whole = Run.load(copy)
    (copy / name).unlink()
    (copy / name).mkdir()
    check(copy, whole)
