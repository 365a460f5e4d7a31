import pytest

from made_files import cifar_files, make, make_folder, make_mnist, make_svhn
from ownerwise_reproduction.data import sources


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory):
    """Tiny files of every data set that a setting names."""
    root = tmp_path_factory.mktemp("data")
    for name in ("cifar10", "ctg", "imdb", "pneumoniamnist", "surnames"):
        make(name, root)
    for name in ("mnist", "fashion_mnist"):
        make_mnist(root / name, records=(60, 20))
    make_svhn(root / "svhn", records=(60, 20))
    make_folder(root / "cifar100" / "cifar-100-python", cifar_files("cifar100", records=200))
    return root


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path, data_dir):
    """No test finds data by accident, or writes outside its own folder."""
    monkeypatch.setenv(sources.DATA_VARIABLE, str(data_dir))
    monkeypatch.setenv(sources.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))
    monkeypatch.chdir(tmp_path)
