"""The loaders on the real files, where OWNERWISE_DATA names a folder that has them.

Counts, shapes, first labels and ranges are those that the sets' own descriptions give; where a set
has no official split, what the rule of the split makes of them.
"""

import os

import numpy as np
import pytest

from ownerwise import data
from ownerwise.errors import OwnerwiseError

FOLDER = os.environ.get("OWNERWISE_DATA")
pytestmark = pytest.mark.skipif(not FOLDER, reason="OWNERWISE_DATA names no folder of real data")


def load(name, **options):
    try:
        return data.load(name, FOLDER, download=False, **options)
    except OwnerwiseError as error:
        if "put it into" not in str(error):
            raise
        pytest.skip(f"{name} is not in OWNERWISE_DATA")


def counts(records, classes):
    return np.bincount(records.targets, minlength=classes).tolist()


MNIST_TRAIN = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
MNIST_TEST = [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
IMAGES = {
    "mnist": ((1, 28, 28), MNIST_TRAIN, MNIST_TEST, [5, 0, 4, 1, 9]),
    "fashion_mnist": ((1, 28, 28), [6000] * 10, [1000] * 10, [9, 0, 0, 3, 0]),
    "cifar10": ((3, 32, 32), [5000] * 10, [1000] * 10, [6, 9, 9, 4, 1]),
    "cifar100": ((3, 32, 32), [500] * 100, [100] * 100, [19, 29, 0, 11, 1]),
    "svhn": (
        (3, 32, 32),
        [4948, 13861, 10585, 8497, 7458, 6882, 5727, 5595, 5045, 4659],
        [1744, 5099, 4149, 2882, 2523, 2384, 1977, 2019, 1660, 1595],
        [1, 9, 2, 3, 2],
    ),
    "pneumoniamnist": ((1, 28, 28), [1214, 3494], [234, 390], None),
}
TABLES = {
    "adult": (88, [24720, 7841], [12435, 3846], [0, 0, 0, 0, 0]),
    "credit_default": (33, [18692, 5309], [4672, 1327], [1, 1, 0, 0, 0]),
    "ctg": (21, [1324, 236, 141], [331, 59, 35], [1, 0, 0, 0, 0]),
    "heart": (25, [132, 112], [32, 27], [0, 1, 1, 0, 0]),
    "parkinsons": (22, [42, 123], [6, 24], [1, 1, 1, 1, 1]),
    "parkinsons_telemonitoring": (20, [2297, 2500], [644, 434], [1, 1, 1, 1, 1]),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.long if "cifar" in name else ()) for name in IMAGES],
)
def test_images(name):
    shape, train, test, first = IMAGES[name]
    loaded = load(name)
    assert loaded.train.inputs.shape[1:] == shape
    assert loaded.train.inputs.dtype == np.float32
    assert counts(loaded.train, len(loaded.classes)) == train
    assert counts(loaded.test, len(loaded.classes)) == test
    assert first is None or loaded.train.targets[:5].tolist() == first
    assert (loaded.train.inputs.min(), loaded.train.inputs.max()) == (0, 1)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if "cifar" in name else ())
        for name in IMAGES
        if name != "pneumoniamnist"
    ],
)
def test_published_constants_standardise(name):
    images = load(name, scale="published").train.inputs
    channels = images.transpose(1, 0, 2, 3).reshape(images.shape[1], -1)
    assert channels.mean(axis=1, dtype=np.float64) == pytest.approx(0, abs=0.002)
    assert channels.std(axis=1, dtype=np.float64) == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("name", TABLES)
def test_tables(name):
    features, train, test, first = TABLES[name]
    loaded = load(name)
    assert loaded.train.inputs.shape[1] == features == len(loaded.features)
    assert counts(loaded.train, len(loaded.classes)) == train
    assert counts(loaded.test, len(loaded.classes)) == test
    assert loaded.train.targets[:5].tolist() == first
    assert np.isfinite(loaded.train.inputs).all()
    assert abs(loaded.train.inputs).max() == 1
    # the declared ranges leave no column without differences
    constant = [
        feature
        for feature, column in zip(loaded.features, loaded.train.inputs.T, strict=True)
        if np.ptp(column) == 0
    ]
    assert constant in ([], ["native-country=Holand-Netherlands"])


def test_parts_of_pneumonia():
    assert counts(load("pneumoniamnist").validation, 2) == [135, 389]


def test_columns_of_tables():
    assert (load("adult").train.columns["sex"] == "Male").sum() == 21790
    telemonitoring = load("parkinsons_telemonitoring", split="records")
    subjects = [records.columns["subject"] for records in telemonitoring.parts().values()]
    assert len(np.unique(np.concatenate(subjects))) == 42
    assert len(np.unique(load("parkinsons").test.columns["subject"])) == 5


def test_workbook_of_cardiotocography(tmp_path):
    loaded = load("ctg")
    workbook = os.path.join(FOLDER, "ctg", "CTG.xls")
    if not os.path.exists(workbook):
        pytest.skip("CTG.xls is not in OWNERWISE_DATA")
    (tmp_path / "CTG.xls").symlink_to(workbook)
    again = data.load("ctg", tmp_path, download=False)
    assert (again.train.inputs == loaded.train.inputs).all()
    assert (again.test.targets == loaded.test.targets).all()


def test_surnames():
    loaded = load("surnames")
    total = [
        sum(pair) for pair in zip(counts(loaded.train, 18), counts(loaded.test, 18), strict=True)
    ]
    assert sum(total) == 20074
    assert dict(zip(loaded.classes, total, strict=True))["Russian"] == 9408
    assert loaded.train.inputs.shape == (16069, 20)
    assert loaded.train.columns["length"].max() == 20
    assert (loaded.train.inputs == 1).sum() < 30  # nearly every letter is in the alphabet


@pytest.mark.long
def test_reviews():
    loaded = load("imdb")
    assert counts(loaded.train, 2) == counts(loaded.test, 2) == [12500, 12500]
    assert loaded.train.inputs.shape == (25000, 256)
    assert 0 <= loaded.train.inputs.min() < loaded.train.inputs.max() < 20_000
    # 72092 words in 19998 places: of an even hash one expects 19454 to be taken, and padding
    assert len(np.unique(loaded.train.inputs)) == 19458 + 1
    assert set(np.unique(loaded.train.columns["rating"])) == {1, 2, 3, 4, 7, 8, 9, 10}
    assert loaded.train.columns["length"].min() >= 5
