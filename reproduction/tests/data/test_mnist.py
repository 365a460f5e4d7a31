"""MNIST and Fashion-MNIST from IDX files."""

import gzip

import numpy as np
import pytest

from made_files import idx, make_mnist, pixels
from ownerwise_reproduction import data
from ownerwise_reproduction.data.mnist import read_idx
from tools.data_tools import problems, write


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("folder", ["mnist", "MNIST/raw", "MNIST"])
def test_images_and_labels(root, folder, ending):
    make_mnist(root / folder, ending)
    loaded = data.load_mnist(root, download=False)
    assert loaded.name == "mnist"
    assert loaded.classes == tuple("0123456789")
    assert (len(loaded.train), len(loaded.test)) == (20, 10)
    assert loaded.train.inputs.shape == (20, 1, 28, 28)
    assert loaded.train.inputs.dtype == np.float32
    assert loaded.train.targets.dtype == np.int64
    assert loaded.train.targets.tolist() == [*range(10)] * 2
    first = pixels(20, 28, 28)[1, 3, 5]
    assert loaded.train.inputs[1, 0, 3, 5] == np.float32(first) / 255
    assert loaded.not_private == ()


@pytest.mark.parametrize(
    ("scale", "black", "white"),
    [("unit", 0, 1), ("signed", -1, 1), ("published", -0.1307 / 0.3081, 0.8693 / 0.3081)],
)
def test_range(root, scale, black, white):
    make_mnist(root / "mnist")
    images = data.load_mnist(root, download=False, scale=scale).train.inputs
    assert images[0, 0, 0, :2] == pytest.approx([black, white], abs=1e-6)
    assert images.min() == pytest.approx(black, abs=1e-6)
    assert images.max() == pytest.approx(white, abs=1e-6)


def test_grey_values_repeated_for_three_channels(root):
    make_mnist(root / "mnist")
    grey = data.load_mnist(root, download=False).train.inputs
    colour = data.load_mnist(root, download=False, channels=3).train.inputs
    assert colour.shape == (20, 3, 28, 28)
    assert all(np.array_equal(colour[:, at], grey[:, 0]) for at in range(3))
    problems(lambda: data.load_mnist(root, channels=2), "channels 2", "1 or 3")


def test_unknown_scale_is_refused(root):
    make_mnist(root / "mnist")
    problems(lambda: data.load_mnist(root, scale="standard"), "'standard'", "'published'")


class TestFashion:
    def test_own_names(self, root):
        make_mnist(root / "fashion-mnist", ".gz")
        assert data.load_fashion_mnist(root, download=False).classes[9] == "Ankle boot"

    def test_files_of_the_system(self, tmp_path):
        make_mnist(tmp_path / "share" / "datasets" / "fashion-mnist", ".gz")
        assert len(data.load_fashion_mnist(download=False).train) == 20

    def test_digits_are_not_taken_for_clothes(self, root):
        """The files of both sets have the same names."""
        make_mnist(root / "mnist")
        make_mnist(root)
        problems(lambda: data.load_fashion_mnist(root, download=False), "fashion_mnist")
        problems(lambda: data.load_fashion_mnist(root / "mnist", download=False), "fashion_mnist")
        assert len(data.load_mnist(root / "mnist", download=False).train) == 20


class TestDamage:
    def test_cut_short(self, root):
        make_mnist(root / "mnist")
        path = root / "mnist" / "train-images-idx3-ubyte"
        path.write_bytes(path.read_bytes()[:-1])
        problems(lambda: data.load_mnist(root), str(path), "15679 bytes", "[20, 28, 28]")

    def test_packed_file_cut_short(self, root):
        make_mnist(root / "mnist", ".gz")
        path = root / "mnist" / "t10k-images-idx3-ubyte.gz"
        path.write_bytes(path.read_bytes()[:100])
        problems(lambda: data.load_mnist(root), str(path), "corrupted")

    @pytest.mark.parametrize("content", [b"", b"\x00\x00", b"<html>not found</html>"])
    def test_other_content(self, tmp_path, content):
        path = write(tmp_path / "labels", content)
        problems(lambda: read_idx(path, 1), "expected 00 00 08 01")

    def test_not_gzip(self, tmp_path):
        path = write(tmp_path / "labels.gz", b"plain")
        problems(lambda: read_idx(path, 1), "labels.gz", "IDX")

    def test_images_without_labels(self, root):
        make_mnist(root / "mnist")
        write(root / "mnist" / "train-labels-idx1-ubyte", idx(np.zeros(3, np.uint8)))
        problems(lambda: data.load_mnist(root), "20 images", "3 labels")

    def test_label_beyond_the_classes(self, root):
        make_mnist(root / "mnist", classes=12)
        problems(lambda: data.load_mnist(root), "mnist, train", "0 to 9")

    def test_checksum_of_gzip(self, root):
        make_mnist(root / "mnist", ".gz")
        path = root / "mnist" / "train-labels-idx1-ubyte.gz"
        content = bytearray(gzip.compress(b"x" * 28))
        content[-6] ^= 1
        path.write_bytes(bytes(content))
        problems(lambda: data.load_mnist(root), str(path))
