"""Adult and the credit card clients."""

import pytest

from made_files import credit_rows, csv_text, make_adult, make_credit, xls
from ownerwise_reproduction import data
from ownerwise_reproduction.data.people import CREDIT_COLUMNS
from tools.data_tools import problems, write

NUMBERED = ["ID", *(f"X{number}" for number in range(1, 24)), "Y"]


class TestAdult:
    def test_official_split(self, root):
        make_adult(root / "adult")
        loaded = data.load_adult(root, download=False)
        assert (len(loaded.train), len(loaded.test)) == (2, 1)
        assert loaded.train.targets.tolist() == [0, 1]
        assert loaded.test.targets.tolist() == [0]  # its label ends in a dot
        assert loaded.train.columns["sex"].tolist() == ["Male", "Female"]
        assert loaded.train.columns["age"].tolist() == [39, 39]
        assert loaded.train.inputs.shape == (2, len(loaded.features)) == (2, 88)

    def test_encoding(self, root):
        make_adult(root / "adult")
        loaded = data.load_adult(root, download=False)
        first, second = (
            dict(zip(loaded.features, row, strict=True)) for row in loaded.train.inputs
        )
        assert first["age"] == pytest.approx(2 * 0.39 - 1)
        assert first["education-num"] == pytest.approx(2 * 12 / 15 - 1)
        assert (first["sex=Male"], first["sex=Female"]) == (1, 0)
        assert first["native-country=United-States"] == 1
        countries = [value for name, value in second.items() if name.startswith("native")]
        assert len(countries) == 41
        assert not any(countries)  # missing: no category

    def test_unknown_category(self, root):
        make_adult(root / "adult")
        path = root / "adult" / "adult.data"
        path.write_text(path.read_text().replace("State-gov", "Pirate"))
        problems(lambda: data.load_adult(root), "workclass", "the value in record 0")

    def test_cut_short(self, root):
        make_adult(root / "adult")
        path = root / "adult" / "adult.test"
        path.write_text(path.read_text()[:-30])
        problems(lambda: data.load_adult(root), str(path), "15 cells", "truncated")

    def test_empty(self, root):
        make_adult(root / "adult")
        write(root / "adult" / "adult.data", "\n")
        problems(lambda: data.load_adult(root), "adult.data", "no rows")

    def test_other_labels(self, root):
        make_adult(root / "adult")
        path = root / "adult" / "adult.data"
        path.write_text(path.read_text().replace("<=50K", "rich"))
        problems(lambda: data.load_adult(root), "unknown value in record 0", "'<=50K'")

    def test_age_that_is_no_number(self, root):
        make_adult(root / "adult")
        path = root / "adult" / "adult.data"
        path.write_text(path.read_text().replace("39", "old"))
        problems(lambda: data.load_adult(root), "adult.data", "whole numbers")


class TestCredit:
    @pytest.mark.parametrize(
        "header",
        [CREDIT_COLUMNS, NUMBERED, [name.replace(" ", ".") for name in CREDIT_COLUMNS]],
    )
    def test_headers(self, root, header):
        make_credit(root / "credit_default", header)
        loaded = data.load_credit_default(root, download=False)
        assert (len(loaded.train), len(loaded.test)) == (16, 4)
        assert loaded.test.targets.tolist() == [0, 1, 0, 1]
        assert loaded.test.columns["age"].tolist() == [24 + 8, 24 + 9, 24 + 18, 24 + 19]
        assert loaded.train.columns["sex"].tolist()[:2] == ["male", "female"]
        assert loaded.train.inputs.shape == (16, 33)
        assert abs(loaded.train.inputs).max() <= 1

    def test_workbook(self, root):
        make_credit(root / "credit_default")
        from_text = data.load_credit_default(root, download=False)
        (root / "credit_default" / "UCI_Credit_Card.csv").unlink()
        sheet = [["", *NUMBERED[1:]], list(CREDIT_COLUMNS), *credit_rows()]
        write(root / "default of credit card clients.xls", xls({"Data": sheet}))
        from_sheet = data.load_credit_default(root, download=False)
        assert (from_sheet.train.inputs == from_text.train.inputs).all()
        assert (from_sheet.test.targets == from_text.test.targets).all()

    def test_other_columns(self, root):
        make_credit(root / "credit_default", ["ID", *CREDIT_COLUMNS[2:], "LIMIT_BAL"])
        problems(lambda: data.load_credit_default(root), "columns", "'LIMIT_BAL'")

    def test_header_alone(self, root):
        write(root / "UCI_Credit_Card.csv", csv_text([CREDIT_COLUMNS]))
        problems(lambda: data.load_credit_default(root), "UCI_Credit_Card.csv", "no rows")
