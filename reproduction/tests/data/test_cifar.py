"""CIFAR-10 and CIFAR-100 from python batches, without running what a pickle asks for."""

import os
import pickle

import numpy as np
import pytest

from made_files import cifar_files, make_folder, make_tar, old_pickle, pixels
from ownerwise_reproduction import data
from ownerwise_reproduction.data.cifar import (
    CIFAR100_CATEGORIES,
    CIFAR100_CLASSES,
    FISH,
    VEHICLES,
    read_batch,
)
from tools.data_tools import problems

FOLDERS = {"cifar10": "cifar-10-batches-py", "cifar100": "cifar-100-python"}
ARCHIVES = {"cifar10": "cifar-10-python.tar.gz", "cifar100": "cifar-100-python.tar.gz"}


def made(root, name, form):
    files, folder = cifar_files(name), FOLDERS[name]
    if form == "archive":
        make_tar(
            root / ARCHIVES[name],
            {f"{folder}/{file}": content for file, content in files.items()},
        )
    else:
        make_folder(root / name / folder, files, form)
    return root


@pytest.mark.parametrize("form", ["", ".xz", ".gz", "archive"])
class TestForms:
    def test_cifar10(self, root, form):
        loaded = data.load_cifar10(made(root, "cifar10", form), download=False)
        assert loaded.train.inputs.shape == (100, 3, 32, 32)
        assert loaded.test.inputs.shape == (20, 3, 32, 32)
        assert loaded.train.inputs.dtype == np.float32
        assert loaded.train.targets[:3].tolist() == [0, 1, 2]
        assert loaded.train.targets[20:23].tolist() == [1, 2, 3]  # the second batch
        red, green = pixels(20, 3072, seed=1)[4, [33, 1024]]
        image = loaded.train.inputs[24]
        assert image[0, 1, 1] == np.float32(red) / 255
        assert image[1, 0, 0] == np.float32(green) / 255
        assert loaded.classes[3] == "cat"

    def test_cifar100(self, root, form):
        loaded = data.load_cifar100(made(root, "cifar100", form), download=False)
        assert (len(loaded.train), len(loaded.test)) == (20, 20)
        assert len(loaded.classes) == 100
        assert loaded.test.targets[0] == 1
        assert loaded.test.columns["category"][0] == "fish"


def test_names_of_cifar100():
    assert (len(CIFAR100_CLASSES), len(CIFAR100_CATEGORIES)) == (100, 20)
    assert list(CIFAR100_CLASSES) == sorted(set(CIFAR100_CLASSES))
    assert list(CIFAR100_CATEGORIES) == sorted(set(CIFAR100_CATEGORIES))
    assert {*FISH, *VEHICLES} < set(CIFAR100_CLASSES)


class Exploit:
    """A pickle of it runs a command when it is loaded without care."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


class TestPickles:
    def test_code_is_not_run(self, root, tmp_path):
        files = cifar_files("cifar10")
        files["data_batch_2"] = pickle.dumps({"data": Exploit(str(tmp_path / "ran"))}, 2)
        make_folder(root / "cifar-10-batches-py", files)
        problems(lambda: data.load_cifar10(root), "data_batch_2", "mkdir", "not run")
        assert not (tmp_path / "ran").exists()

    @pytest.mark.parametrize(
        "asked", [b"cbuiltins\neval\n.", b"cnumpy\nload\n.", b"cnumpy.core.multiarray\nscalar\n."]
    )
    def test_other_names_are_refused(self, asked):
        with pytest.raises(ValueError, match="not run"):
            read_batch(asked, ("labels",))

    @pytest.mark.parametrize("kind", [b"O8", b"f8"])
    def test_other_arrays_are_refused(self, kind):
        content = cifar_files("cifar10", 2)["test_batch"].replace(b"U\x02u1", b"U\x02" + kind)
        with pytest.raises(ValueError, match="unsigned bytes"):
            read_batch(content, ("labels",))

    def test_fewer_labels_than_images(self):
        content = old_pickle({"labels": [1, 2], "data": pixels(3, 3072)})
        with pytest.raises(ValueError, match="2 labels for 3 images"):
            read_batch(content, ("labels",))

    def test_no_array(self):
        with pytest.raises(ValueError, match="not an array"):
            read_batch(old_pickle({"labels": [1], "data": [1]}), ("labels",))


class TestDamage:
    def test_batch_cut_short(self, root):
        files = cifar_files("cifar10")
        files["test_batch"] = files["test_batch"][:-500]
        make_folder(root / "cifar-10-batches-py", files)
        problems(lambda: data.load_cifar10(root), "test_batch", "corrupted")

    def test_packed_batch_cut_short(self, root):
        make_folder(root / "cifar-10-batches-py", cifar_files("cifar10"), ".xz")
        path = root / "cifar-10-batches-py" / "data_batch_3.xz"
        path.write_bytes(path.read_bytes()[:-100])
        problems(lambda: data.load_cifar10(root), "data_batch_3.xz", "corrupted")

    def test_batches_missing(self, root):
        files = cifar_files("cifar10")
        del files["data_batch_1"], files["test_batch"]
        make_folder(root / "cifar-10-batches-py", files)
        problems(lambda: data.load_cifar10(root), "does not contain data_batch_1, test_batch")

    def test_archive_cut_short(self, root):
        path = made(root, "cifar100", "archive") / ARCHIVES["cifar100"]
        path.write_bytes(path.read_bytes()[:-2000])
        problems(lambda: data.load_cifar100(root), str(path))

    def test_other_keys(self, root):
        make_folder(root / "cifar-100-python", dict.fromkeys(("train", "test"), old_pickle({})))
        problems(lambda: data.load_cifar100(root), "train", "data")
