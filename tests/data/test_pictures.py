"""Pictures of a folder that a table names: real files, read back pixel by pixel."""

import numpy as np
import pytest
from PIL import Image

import ownerwise as ow
from ownerwise.data import Pictures, load_table
from ownerwise.errors import OwnerwiseError

NAMES = [f"{number:03d}.png" for number in range(10)]
SMILES = [number % 2 for number in range(10)]


def pixels(number: int, height: int = 6, width: int = 4) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path):
    """Ten pictures, and what is known of them in two forms."""
    (tmp_path / "faces").mkdir()
    for number, name in enumerate(NAMES):
        Image.fromarray(pixels(number)).save(tmp_path / "faces" / name)
    rows = [f"{name},{smile},o{smile}" for name, smile in zip(NAMES, SMILES, strict=True)]
    (tmp_path / "faces.csv").write_text("\n".join(["picture,smiling,who", *rows]) + "\n")
    rows = [f"{n}  {1 if s else -1}  -1" for n, s in zip(NAMES, SMILES, strict=True)]
    (tmp_path / "list_attr.txt").write_text("\n".join(["10", "Smiling Male ", *rows]) + "\n")
    return tmp_path


def load(folder, name="faces.csv", **options):
    table = {"target": "smiling", "features": {"picture": Pictures("faces", **options)}}
    return load_table(folder / name, classes=["0", "1"], test_share=None, **table)


def test_pictures_are_read_in_the_order_of_the_table(folder):
    data = load(folder)
    assert data.train.inputs.shape == (10, 3, 6, 4)
    assert data.train.inputs.dtype == np.float32
    for number in range(10):
        expected = pixels(number).transpose(2, 0, 1) / np.float32(255)
        assert np.array_equal(data.train.inputs[number], expected)
    assert data.train.targets.tolist() == SMILES


def test_a_list_of_attributes_as_celeba_has_it(folder):
    features = {"file": {"folder": "faces", "scale": "signed"}}
    data = load_table(
        folder / "list_attr.txt", target="Smiling", classes=[-1, 1], columns=["Male"],
        features=features, test_share=None,
    )  # fmt: skip
    assert len(data.train) == 10
    assert set(data.train.columns["Male"]) == {"-1"}
    assert data.train.inputs.min() < 0
    first = pixels(0).transpose(2, 0, 1) / np.float32(255) * 2 - 1
    assert np.allclose(data.train.inputs[0], first, atol=1e-6)


def test_sizes_and_grey(folder):
    small = load(folder, size=(3, 2), channels=1).train.inputs
    assert small.shape == (10, 1, 3, 2)
    grey = np.asarray(Image.fromarray(pixels(4)).convert("L").resize((2, 3), Image.BILINEAR))
    assert np.allclose(small[4, 0], grey / 255)


def test_owners_and_a_model_follow(folder):
    data = load_table(
        folder / "faces.csv", target="smiling", owner="who", classes=["0", "1"],
        features={"picture": Pictures("faces")}, test_share=None,
    )  # fmt: skip
    owners = ow.Owners(data.train.columns["owner"], {"o0": 1.0, "o1": 2.0}, delta=1e-5)
    assert owners.records.tolist() == [5, 5]
    assert ow.models.ResNet18(classes=2, width=8, groups=4)(data.train.tensors()[0]).shape == (
        10,
        2,
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda f: (f / "faces/003.png").unlink(),
            r"names in record 3 is not in .*faces; expected one",
        ),
        (
            lambda f: (f / "faces/003.png").write_bytes(b"no picture"),
            "file of record 3 cannot be read as",
        ),
        (
            lambda f: Image.fromarray(pixels(3, 5, 5)).save(f / "faces/003.png"),
            r"the pictures have different sizes.*pass size",
        ),
    ],
    ids=["missing", "damaged", "another size"],
)
def test_files_that_do_not_fit(folder, spoil, message):
    spoil(folder)
    with pytest.raises(OwnerwiseError, match=message):
        load(folder)


def test_a_list_of_attributes_cut_short(folder):
    path = folder / "list_attr.txt"
    path.write_text(path.read_text().replace("10\n", "11\n", 1))
    with pytest.raises(OwnerwiseError, match="number of rows differs from the number in"):
        load_table(path, target="Smiling", features={"file": Pictures("faces")})


@pytest.mark.parametrize(
    ("features", "message"),
    [
        (
            {"picture": {"sise": 3}},
            "has the options sise; expected .* options for picture files \\(folder, size",
        ),
        ({"picture": Pictures("faces"), "who": None}, "so it must be the only feature"),
    ],
)
def test_declarations_that_do_not_fit(folder, features, message):
    with pytest.raises(OwnerwiseError, match=message):
        load_table(folder / "faces.csv", target="smiling", classes=["0", "1"], features=features)


def test_all_problems_of_the_options_at_once():
    with pytest.raises(OwnerwiseError) as error:
        Pictures(size=(0, 3), channels=2)
    assert len(error.value.problems) == 2
