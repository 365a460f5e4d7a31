"""Owner ids that look alike, collide, or draw on the terminal.

The attacks: give an owner another's epsilon by an id that is read as the same one; forge a row of a
table, or turn the text around, by control characters and direction marks in an id.
"""

import numpy as np
import pandas as pd
import pytest
import yaml

import ownerwise as ow
from ownerwise import evaluation
from ownerwise.cli.main import main
from ownerwise.config.build import prepare_run
from ownerwise.config.reading import make_config
from ownerwise.errors import BudgetError, OwnerwiseError, PrivacyWarning, name_some, printable
from ownerwise.report.card import card_text
from ownerwise.report.rendering import escape_html
from tools import training_tools as tools

FORGED = "ann\n  bob      100   0.1\x1b[2K\u202e\u2028"
HIDDEN = "\n\r\x1b\u202e\u2028\u200f\x00\x07"


def shows_nothing_hidden(text):
    return not set(text) & set(HIDDEN)


class TestKeys:
    def prepared(self, folder, epsilon):
        rows = "".join(f"{3 + k % 2},{k},{k % 2}\n" for k in range(60))
        (folder / "t.csv").write_text("who,x,y\n" + rows)
        config = {
            "data": {"file": "t.csv", "target": "y", "owner": "who", "classes": ["0", "1"]},
            "owners": {"epsilon": epsilon},
            "plan": {"steps": 3, "batch_size": 8},
            "model": {"name": "mlp"},
            "training": {"lr": 0.1},
        }
        return prepare_run(make_config(config, base=folder), folder=folder / "run")

    def test_numbers_as_the_data_write_them(self, tmp_path):
        made = self.prepared(tmp_path, {"3": 1.0, "4": 2.0})
        assert made.plan.owners.ids.tolist() == [3, 4]
        assert made.plan.owners.epsilon.tolist() == [1.0, 2.0]

    @pytest.mark.parametrize("key", ["03", "+3", "٣", "3 ", "3.0", "-0", "３", "1_0"])
    def test_other_spellings_are_refused_by_name(self, tmp_path, key):
        with pytest.raises(OwnerwiseError, match="whole numbers") as error:
            self.prepared(tmp_path, {"3": 1.0, "4": 1.0, key: 9.0})
        assert ascii(key) in str(error.value)


class TestLookalikes:
    @pytest.mark.parametrize(
        "other",
        ["Zo\u0065\u0308", "Zo\u00eb\u200b", "Zo\u00eb ", "\ufeffZo\u00eb", "Zo\u00eb\u00ad"]
        + [f"Zo\u00eb{mark}" for mark in "\ufe0f\u3164\uffa0\u034f\u180b\u2800\u2065\U000e0101"],
    )
    def test_ids_that_look_the_same(self, other):
        with pytest.raises(BudgetError, match="look the same") as error:
            ow.Owners(None, {"Zo\u00eb": 1.0, other: 9.0}, 1e-5)
        assert ascii(other) in str(error.value)
        with pytest.raises(BudgetError, match="look the same"):
            ow.Owners(["Zo\u00eb", other], {"Zo\u00eb": 1.0, other: 9.0}, 1e-5)

    def test_compatible_letters(self):
        with pytest.raises(BudgetError, match="look the same"):
            ow.Owners(None, {"file": 1.0, "\ufb01le": 9.0}, 1e-5)

    def test_other_letters_and_cases_are_other_owners(self):
        names = ["ann", "Ann", "\u0430nn", "ann b", "a nn", "007", "7"]
        assert len(ow.Owners(None, dict.fromkeys(names, 1.0), 1e-5)) == len(names)

    def test_a_record_whose_owner_looks_like_one_with_a_budget(self):
        with pytest.raises(BudgetError, match="look the same"):
            ow.Owners(["Zo\u0065\u0308"], {"Zo\u00eb": 1.0}, 1e-5)

    def test_nul_characters_which_arrays_drop(self):
        with pytest.raises(BudgetError, match="NUL"):
            ow.Owners(None, {"a": 1.0, "a\x00": 9.0}, 1e-5)
        with pytest.raises(BudgetError, match="NUL"):
            ow.Owners(["a", "a\x00"], {"a": 1.0}, 1e-5)


class TestTerminal:
    def test_printable(self):
        assert printable("Zo\u00eb, 3 \u05d0") == "Zo\u00eb, 3 \u05d0"
        assert printable("a\nb\x1b\u202e\ud800") == r"a\nb\x1b\u202e\ud800"
        assert name_some(["a\n", "b"]) == r"a\n, b"

    def owners(self):
        return ow.Owners([FORGED] * 30 + ["bob"] * 30, {FORGED: 1.0, "bob": 2.0}, 1e-5)

    def test_a_plan_has_one_row_per_owner(self):
        plan = ow.plan(self.owners(), steps=3, batch_size=10)
        lines = plan.describe(owners=True).splitlines()
        assert sum("bob" in line for line in lines) == 2  # his own, and the escaped name
        assert all(map(shows_nothing_hidden, lines))

    def test_errors_and_warnings(self):
        with pytest.raises(BudgetError) as error:
            ow.Owners([FORGED], {"bob": 1.0}, 1e-5)
        assert all(map(shows_nothing_hidden, error.value.problems))
        with pytest.raises(BudgetError) as error:
            ow.Owners(None, {FORGED: -1.0}, 1e-5)
        assert all(map(shows_nothing_hidden, error.value.problems))
        with pytest.warns(PrivacyWarning) as caught:
            ow.Owners(None, {FORGED: 1.0}, 0.9, records=1000)
        assert shows_nothing_hidden(str(caught[0].message))

    @pytest.mark.filterwarnings("always:the number of training records")
    def test_the_command_line(self, tmp_path, capsys, monkeypatch):
        monkeypatch.chdir(tmp_path)
        rows = "".join(f'"{FORGED}",{k},{k % 2}\n' for k in range(200))
        (tmp_path / "t.csv").write_text("who,x,y\n" + rows, encoding="utf-8", newline="")
        (tmp_path / "b.csv").write_text(
            f'owner,epsilon,records\n"{FORGED}",3.0,200\n', encoding="utf-8", newline=""
        )
        (tmp_path / "run.toml").write_text(
            '[data]\nfile = "t.csv"\ntarget = "y"\nowner = "who"\nclasses = ["0", "1"]\n'
            'features = { x = [0, 200] }\n[owners]\nbudgets = "b.csv"\n[plan]\nsteps = 3\n'
            'batch_size = 20\n[model]\nname = "mlp"\n[training]\nlr = 0.1\n'
        )
        assert main(["plan", "b.csv", "--owners", "--steps", "3", "--batch-size", "9"]) == 0
        assert main(["train", "run.toml", "--folder", "out"]) == 0
        output = capsys.readouterr()
        for line in (output.out + output.err).split("\n"):
            assert shows_nothing_hidden(line.replace("\r", ""))
        card = (tmp_path / "out" / "CARD.md").read_text(encoding="utf-8")
        report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        for text in (card, report):
            assert not set(text) & set("\x1b\u202e\u2028\u200f\x00\x07")


class TestCard:
    reason = "means](http://x) **Private.** <b>\n\n# Private\n---\ntags: [private] \u202e"

    def test_reasons_are_text(self):
        trainer = tools.make_trainer(seed=None, notes={"not_private": [self.reason]})
        text = card_text(trainer.fit(tools.data()))
        head, body = text.split("---\n", 2)[1:]
        assert "not-private" in yaml.safe_load(head)["tags"]
        assert "\n# Private\n" not in body
        assert "**Private.**" not in body
        assert "<b>" not in body
        assert shows_nothing_hidden(body.replace("\n", ""))

    def test_html(self):
        shown = escape_html(f"<b>{FORGED}")
        assert "<b>" not in shown
        assert not set(shown) & set(HIDDEN) - {"\n"}


class TestGroups:
    @pytest.fixture(autouse=True)
    def _groups_may_be_small(self, monkeypatch):
        for module in (evaluation.groups, evaluation.metrics):
            monkeypatch.setattr(module, "SMALLEST_GROUP", 1)

    def run(self, groups):
        inputs, targets = (tensor[:6].clone() for tensor in tools.data())
        trainer = tools.make_trainer()
        return trainer.fit(
            tools.data(), validation=(inputs, targets), validation_groups=groups
        ).history[-1]["validation"]["groups"]

    @pytest.mark.parametrize(
        "groups",
        [
            ["a", "a", "b", "b", "b", "c"],
            np.array(["a", "a", "b", "b", "b", "c"], dtype=object),
            pd.Series(["a", "a", "b", "b", "b", "c"], dtype=object),
            pd.Series(["a", "a", "b", "b", "b", "c"], dtype="category"),
        ],
    )
    def test_texts_in_any_array(self, groups):
        found = self.run(groups)
        assert {name: group["records"] for name, group in found.items()} == {"a": 2, "b": 3, "c": 1}

    def test_numbers_as_objects(self):
        found = self.run(np.array([3, 3, 3, 5, 5, 5], dtype=object))
        assert set(found) == {"3", "5"}

    @pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
    def test_a_record_without_a_group(self, missing):
        with pytest.raises(OwnerwiseError, match=r"validation_groups: no name in record 2;"):
            self.run(["a", "b", missing, "a", "b", "a"])

    def test_mixed_types(self):
        with pytest.raises(OwnerwiseError, match="validation_groups: names of type int and str"):
            self.run([1, "1", 1, 1, 1, 1])
