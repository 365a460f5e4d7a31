"""Cardiotocography, heart disease and the two Parkinsons sets."""

import numpy as np
import pytest

from made_files import (
    make_ctg,
    make_ctg_workbook,
    make_heart,
    make_parkinsons,
    make_telemonitoring,
    xls,
)
from ownerwise.errors import PrivacyWarning
from ownerwise_reproduction import data
from tools.data_tools import problems, write


def feature(loaded, name):
    return loaded.train.inputs[:, loaded.features.index(name)]


class TestCtg:
    def test_classes_and_rates(self, root):
        make_ctg(root / "ctg")
        loaded = data.load_ctg(root, download=False)
        assert loaded.classes == ("normal", "suspect", "pathologic")
        assert (len(loaded.train), len(loaded.test)) == (17, 3)  # 7, 7 and 6 records: one of each
        assert loaded.test.targets.tolist() == [0, 1, 2]
        assert loaded.train.targets[:4].tolist() == [0, 1, 2, 0]
        assert len(loaded.features) == 21
        # 1 acceleration in 100 s is the middle of the declared range of 0 to 0.02 per second
        assert feature(loaded, "AC")[:3].tolist() == pytest.approx([-1, 0, 1])
        assert feature(loaded, "LB").tolist() == [0] * 17
        assert loaded.train.columns["file"][:3].tolist() == ["f0.txt", "f0.txt", "f1.txt"]
        assert loaded.train.columns["pattern"][:3].tolist() == [1, 2, 3]

    def test_workbook_says_the_same(self, root):
        make_ctg(root / "one")
        make_ctg_workbook(root / "two")
        text = data.load_ctg(root / "one", download=False)
        workbook = data.load_ctg(root / "two", download=False)
        for part in ("train", "test"):
            first, second = text.parts()[part], workbook.parts()[part]
            assert (first.inputs == second.inputs).all()
            assert (first.targets == second.targets).all()
            assert (first.columns["file"] == second.columns["file"]).all()

    def test_statistics_are_marked(self, root):
        make_ctg(root / "ctg")
        with pytest.warns(PrivacyWarning, match="NOT private"):
            loaded = data.load_ctg(root, download=False, scale="statistics")
        assert "training records" in loaded.not_private[0]
        assert "NOT PRIVATE" in repr(loaded)
        accelerations = feature(loaded, "AC")
        assert accelerations.mean() == pytest.approx(0, abs=1e-6)
        assert accelerations.std() == pytest.approx(1, abs=1e-6)

    def test_no_scaling(self, root):
        make_ctg(root / "ctg")
        loaded = data.load_ctg(root, download=False, scale="none")
        assert feature(loaded, "LB").tolist() == [125] * 17

    def test_other_sheet(self, root):
        write(root / "CTG.xls", xls({"Data": [["text"]]}))
        problems(lambda: data.load_ctg(root), "CTG.xls", "'Raw Data'")

    @pytest.mark.parametrize("content", [b"", b"no workbook", b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1"])
    def test_no_workbook(self, root, content):
        write(root / "CTG.xls", content)
        problems(lambda: data.load_ctg(root), "CTG.xls", "Excel workbook")

    def test_cell_that_is_no_number(self, root):
        make_ctg(root / "ctg")
        path = root / "ctg" / "CTG.csv"
        path.write_text(path.read_text().replace(",125,", ",fast,"))
        problems(lambda: data.load_ctg(root), "CTG.csv", "ValueError")

    def test_class_out_of_range(self, root):
        make_ctg(root / "ctg")
        path = root / "ctg" / "CTG.csv"
        path.write_text(path.read_text().replace(",3\n", ",4\n"))
        problems(lambda: data.load_ctg(root), "NSP", "unknown value in record 2")


class TestHeart:
    def test_missing_values(self, root):
        make_heart(root / "heart")
        loaded = data.load_heart(root, download=False)
        assert (len(loaded.train), len(loaded.test)) == (16, 4)
        assert loaded.train.targets.tolist() == [0] * 8 + [1] * 8
        assert loaded.train.columns["severity"].tolist() == [0] * 8 + [3] * 8
        assert loaded.train.columns["sex"].tolist() == ["male"] * 8 + ["female"] * 8
        assert feature(loaded, "ca").tolist() == [-1] * 8 + [0] * 8  # the middle, where missing
        assert feature(loaded, "thal=6").tolist() == [1] * 8 + [0] * 8
        assert feature(loaded, "thal=7").sum() == 0
        assert np.isfinite(loaded.train.inputs).all()

    def test_cut_short(self, root):
        make_heart(root / "heart")
        path = root / "heart" / "processed.cleveland.data"
        path.write_text(path.read_text()[:-8])
        problems(lambda: data.load_heart(root), "line 20 (11)")


class TestParkinsons:
    def test_subjects_stay_together(self, root):
        make_parkinsons(root / "parkinsons")
        loaded = data.load_parkinsons(root, download=False)
        # six subjects of each class, of whom the fifth is a test subject
        assert sorted(set(loaded.test.columns["subject"])) == ["phon_R01_S09", "phon_R01_S10"]
        assert not set(loaded.test.columns["subject"]) & set(loaded.train.columns["subject"])
        assert (len(loaded.train), len(loaded.test)) == (30, 6)
        assert loaded.train.inputs.shape == (30, 22)

    def test_by_records(self, root):
        make_parkinsons(root / "parkinsons")
        loaded = data.load_parkinsons(root, download=False, split="records")
        assert (len(loaded.train), len(loaded.test)) == (30, 6)
        assert len(set(loaded.test.columns["subject"])) == 6

    def test_other_split(self, root):
        make_parkinsons(root / "parkinsons")
        problems(lambda: data.load_parkinsons(root, split="random"), "'random'", "'subjects'")

    def test_other_file(self, root):
        make_parkinsons(root / "parkinsons")
        path = root / "parkinsons" / "parkinsons.data"
        path.write_text(path.read_text().replace("status", "state"))
        problems(lambda: data.load_parkinsons(root), "parkinsons.data", "a different file")


class TestTelemonitoring:
    def test_classes_by_threshold(self, root):
        make_telemonitoring(root / "parkinsons")
        loaded = data.load_parkinsons_telemonitoring(root, download=False, threshold=26)
        assert loaded.classes == ("at most 26", "above 26")
        assert ((loaded.train.columns["score"] > 26) == (loaded.train.targets == 1)).all()
        assert sorted(set(loaded.test.columns["subject"])) == [5, 11]
        assert loaded.train.columns["sex"][0] == "female"
        assert "motor_UPDRS" not in loaded.features
        assert "total_UPDRS" not in loaded.features

    def test_motor_score_on_request(self, root):
        make_telemonitoring(root)
        loaded = data.load_parkinsons_telemonitoring(root, download=False, motor_score=True)
        assert feature(loaded, "motor_UPDRS").tolist() == pytest.approx([-0.2] * len(loaded.train))

    def test_damage(self, root):
        make_telemonitoring(root)
        path = root / "parkinsons_updrs.data"
        path.write_text(path.read_text().replace(",21,", ",?,"))
        problems(lambda: data.load_parkinsons_telemonitoring(root), "parkinsons_updrs.data")
