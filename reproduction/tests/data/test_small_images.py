"""SVHN and PneumoniaMNIST."""

import numpy as np
import pytest
from scipy.io import savemat

from made_files import make_pneumonia, make_svhn, pixels
from ownerwise_reproduction import data
from tools.data_tools import problems, write


class TestSvhn:
    def test_images_and_labels(self, root):
        make_svhn(root / "svhn")
        loaded = data.load_svhn(root, download=False)
        assert loaded.train.inputs.shape == (20, 3, 32, 32)
        assert loaded.train.inputs.dtype == np.float32
        assert loaded.train.inputs.flags.c_contiguous
        assert loaded.train.targets[:10].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0]  # 10 is a zero
        assert len(loaded.test) == 10
        source = pixels(32, 32, 3, 20)[7, 9, 2, 4]
        assert loaded.train.inputs[4, 2, 7, 9] == np.float32(source) / 255

    @pytest.mark.parametrize("content", [b"", b"no matlab file" * 20])
    def test_other_content(self, root, content):
        make_svhn(root / "svhn")
        path = write(root / "svhn" / "train_32x32.mat", content)
        problems(lambda: data.load_svhn(root), str(path), "MATLAB")

    def test_cut_short(self, root):
        make_svhn(root / "svhn")
        path = root / "svhn" / "test_32x32.mat"
        path.write_bytes(path.read_bytes()[:-3000])
        problems(lambda: data.load_svhn(root), str(path), "corrupted")

    @pytest.mark.parametrize("labels", [[0, 1], [1, 11], [1, 2, 3]])
    def test_labels_that_do_not_fit(self, root, labels):
        make_svhn(root / "svhn")
        arrays = {"X": pixels(32, 32, 3, 2), "y": np.array(labels, np.uint8)[:, None]}
        savemat(root / "svhn" / "train_32x32.mat", arrays)
        problems(lambda: data.load_svhn(root), "labels")


class TestPneumonia:
    def test_three_parts(self, root):
        make_pneumonia(root / "pneumoniamnist")
        loaded = data.load_pneumoniamnist(root, download=False, scale="signed")
        sizes = {name: len(records) for name, records in loaded.parts().items()}
        assert sizes == {"train": 20, "validation": 6, "test": 10}
        assert loaded.train.inputs.shape == (20, 1, 28, 28)
        assert -1 <= loaded.train.inputs.min() < 0 < loaded.train.inputs.max() <= 1
        assert loaded.train.targets[:4].tolist() == [0, 1, 0, 1]
        assert loaded.classes == ("normal", "pneumonia")

    def test_grey_values_repeated_for_three_channels(self, root):
        make_pneumonia(root / "pneumoniamnist")
        grey = data.load_pneumoniamnist(root, download=False).train.inputs
        colour = data.load_pneumoniamnist(root, download=False, channels=3).train.inputs
        assert colour.shape == (20, 3, 28, 28)
        assert all(np.array_equal(colour[:, at], grey[:, 0]) for at in range(3))
        problems(lambda: data.load_pneumoniamnist(root, channels=2), "channels 2", "1 or 3")

    def test_no_published_constants(self, root):
        make_pneumonia(root / "pneumoniamnist")
        problems(lambda: data.load_pneumoniamnist(root, scale="published"), "'unit', 'signed'")

    def test_cut_short(self, root):
        make_pneumonia(root / "pneumoniamnist")
        path = root / "pneumoniamnist" / "pneumoniamnist.npz"
        path.write_bytes(path.read_bytes()[:-10])
        problems(lambda: data.load_pneumoniamnist(root), str(path))

    def test_pickled_arrays_are_not_loaded(self, root):
        folder = root / "pneumoniamnist"
        folder.mkdir()
        np.savez(folder / "pneumoniamnist.npz", train_images=np.array([{}], dtype=object))
        problems(lambda: data.load_pneumoniamnist(root), "pneumoniamnist.npz", "pickle")

    def test_arrays_missing(self, root):
        (root / "pneumoniamnist").mkdir()
        np.savez(root / "pneumoniamnist" / "pneumoniamnist.npz", images=pixels(2, 28, 28))
        problems(lambda: data.load_pneumoniamnist(root), "train_images")
