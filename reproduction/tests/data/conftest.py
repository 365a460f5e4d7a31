import pytest

from ownerwise_reproduction.data import sources


@pytest.fixture(autouse=True)
def places(monkeypatch, tmp_path):
    """No test finds data by accident, or writes outside its own folder."""
    monkeypatch.delenv(sources.DATA_VARIABLE, raising=False)
    monkeypatch.setenv(sources.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_DIRS", str(tmp_path / "share"))


@pytest.fixture
def root(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    return folder
