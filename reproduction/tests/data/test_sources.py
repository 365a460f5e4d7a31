"""Where files are looked for, and how they are fetched: whole and checked, or not at all."""

import hashlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from ownerwise_reproduction.data.sources import (
    CACHE_VARIABLE,
    DATA_VARIABLE,
    Download,
    Part,
    Source,
    locate,
)
from tools.data_tools import problems, write

CONTENT = b"some records\n" * 50_000  # several chunks


@pytest.fixture
def site():
    """A server on this machine: /whole, /short (ends early), /empty; else not found."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            if self.path == "/missing":
                self.send_error(404)
                return
            self.send_response(200)
            if self.path != "/unsized":
                self.send_header("Content-Length", str(len(CONTENT)))
            self.end_headers()
            self.wfile.write(CONTENT[:1000] if self.path == "/short" else CONTENT)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
        server.shutdown()
        thread.join()


def source(*urls, sha256=None, **options):
    digest = sha256 or hashlib.sha256(CONTENT).hexdigest()
    part = Part(("file.bin", "file.txt"), (Download("file.bin", urls, digest),))
    return Source("things", "https://example.org/things", (part,), **options)


def two_parts(site):
    digest = hashlib.sha256(CONTENT).hexdigest()
    return Source(
        "things",
        "https://example.org/things",
        tuple(
            Part((name,), (Download(name, (f"{site}/{path}",), digest),))
            for name, path in (("one", "whole"), ("two", "missing"))
        ),
    )


def files_below(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


class TestFinding:
    @pytest.mark.parametrize("folder", ["things", "Things/raw", ""])
    def test_layouts(self, root, folder):
        path = write(root / folder / "file.txt", b"x")
        assert locate(source(folders=("Things/raw",)), root, download=False) == [path]

    def test_variable(self, root, monkeypatch):
        path = write(root / "things" / "file.bin", b"x")
        monkeypatch.setenv(DATA_VARIABLE, str(root))
        assert locate(source(), download=False) == [path]

    def test_data_dir_goes_before_the_variable(self, root, tmp_path, monkeypatch):
        write(tmp_path / "other" / "file.bin", b"x")
        path = write(root / "things" / "file.bin", b"x")
        monkeypatch.setenv(DATA_VARIABLE, str(tmp_path / "other"))
        assert locate(source(), root, download=False) == [path]

    def test_given_files_need_no_checksum(self, root, site):
        """People keep other versions and compressions of the same data."""
        url, asked = site
        write(root / "file.bin", b"another version")
        locate(source(f"{url}/whole"), root)
        assert asked == []

    def test_names_shared_with_other_sets(self, root):
        write(root / "file.bin", b"x")
        problems(lambda: locate(source(own_names=False), root, download=False), "file.bin")
        path = write(root / "things" / "file.bin", b"x")
        assert locate(source(own_names=False), root / "things", download=False) == [path]

    def test_inner_folders_are_not_taken_for_each_other(self, root):
        write(root / "Other" / "raw" / "file.bin", b"x")
        path = write(root / "Things" / "raw" / "file.bin", b"x")
        shared = source(own_names=False, folders=("Things/raw",))
        problems(lambda: locate(shared, root / "Other" / "raw", download=False), "file.bin")
        assert locate(shared, root / "Things" / "raw", download=False) == [path]

    @pytest.mark.parametrize("by_variable", [True, False])
    def test_no_such_folder(self, tmp_path, monkeypatch, by_variable):
        gone = tmp_path / "gone"
        monkeypatch.setenv(DATA_VARIABLE, str(gone))
        name = DATA_VARIABLE if by_variable else "data_dir"
        given = None if by_variable else gone
        problems(lambda: locate(source(), given, download=False), name, str(gone), "not a folder")

    def test_message_says_what_to_put_where(self, root):
        (problem,) = problems(lambda: locate(source(), root, download=False))
        assert "file.bin or file.txt" in problem
        assert f"put it into {root / 'things'}" in problem
        assert "https://example.org/things" in problem
        assert "download=False" in problem

    @pytest.mark.parametrize("system", [None, "things"])
    def test_message_without_a_data_folder(self, tmp_path, system):
        (problem,) = problems(lambda: locate(source(system=system), download=False))
        assert f"put it into {tmp_path / 'cache' / 'things'}" in problem
        assert DATA_VARIABLE in problem


class TestFetching:
    @pytest.mark.parametrize("path", ["whole", "unsized"])
    def test_into_the_cache_once(self, root, tmp_path, site, path):
        url, asked = site
        (first,) = locate(source(f"{url}/{path}"), root)
        assert first == tmp_path / "cache" / "things" / "file.bin"
        assert first.read_bytes() == CONTENT
        assert locate(source(f"{url}/{path}"), root) == [first]
        assert asked == [f"/{path}"]
        assert files_below(root) == []

    def test_file_address(self, tmp_path):
        path = write(tmp_path / "home" / "file", CONTENT)
        (found,) = locate(source(path.as_uri()))
        assert found.read_bytes() == CONTENT

    def test_next_mirror(self, site):
        url, asked = site
        addresses = [f"{url}/{path}" for path in ("missing", "short", "whole")]
        (found,) = locate(source(*addresses))
        assert found.read_bytes() == CONTENT
        assert asked == ["/missing", "/short", "/whole"]

    @pytest.mark.parametrize(
        ("path", "digest", "words"),
        [
            ("missing", None, ("404",)),
            ("short", None, (f"1000 of {len(CONTENT)} bytes",)),
            ("whole", "0" * 64, ("SHA-256", "0" * 64, "was discarded")),
        ],
    )
    def test_nothing_is_left_behind(self, tmp_path, site, path, digest, words):
        url, _ = site
        problems(
            lambda: locate(source(f"{url}/{path}", sha256=digest)),
            f"{url}/{path}",
            "https://example.org/things",
            *words,
        )
        assert files_below(tmp_path) == []

    def test_no_network(self):
        problems(lambda: locate(source("http://127.0.0.1:1/file")), "127.0.0.1:1", "put it into")

    def test_all_missing_parts_are_named(self, site):
        """What could be had is kept for the next time."""
        url, asked = site
        assert len(problems(lambda: locate(two_parts(url)), "two", "404")) == 1
        assert len(problems(lambda: locate(two_parts(url), download=False), "two")) == 1
        assert asked == ["/whole", "/missing"]

    def test_cut_short_among_several_files(self, site, tmp_path):
        """A folder of which only some files came is fetched to the end the next time."""
        url, asked = site
        digest = hashlib.sha256(CONTENT).hexdigest()

        def folder(second):
            downloads = tuple(
                Download(f"names/{name}", (f"{url}/{path}",), digest)
                for name, path in (("a.txt", "whole"), ("b.txt", second))
            )
            return Source("things", "page", (Part(("names",), downloads),))

        problems(lambda: locate(folder("missing")), "404")
        (found,) = locate(folder("whole"))
        assert found == tmp_path / "cache" / "things" / "names"
        assert files_below(found) == ["a.txt", "b.txt"]
        assert asked == ["/whole", "/missing", "/whole"]

    def test_cache_that_cannot_be_written(self, tmp_path, monkeypatch, site):
        url, _ = site
        write(tmp_path / "taken", b"a file")
        monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "taken"))
        problems(lambda: locate(source(f"{url}/whole")), CACHE_VARIABLE, "taken")
