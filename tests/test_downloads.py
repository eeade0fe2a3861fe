"""Files from elsewhere: whole and right, or not there."""

import hashlib
import multiprocessing
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from project.downloads import RemoteFile, fetch

CONTENT = bytes(range(256)) * 5000


class Server(HTTPServer):
    asked = 0


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked += 1
        if "missing" in self.path:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()
        self.wfile.write(CONTENT[: 1000 if "short" in self.path else None])

    def log_message(self, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.shutdown()
        thread.join()


def remote(server: Server, name: str = "data.bin", digest: str | None = None) -> RemoteFile:
    return RemoteFile(f"http://127.0.0.1:{server.server_port}/{name}", digest or hashlib.sha256(CONTENT).hexdigest())


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if not path.name.startswith(".")}


def test_a_file_is_downloaded_once_and_whole(server: Server, tmp_path: Path) -> None:
    for _ in range(2):
        (path,) = fetch([remote(server)], tmp_path / "new" / "folder")
        assert path.read_bytes() == CONTENT
    assert server.asked == 1
    assert names(path.parent) == {"data.bin"}


def test_processes_that_ask_at_once_download_once(server: Server, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fetch, args=([remote(server)], tmp_path)) for _ in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0] * 4
    assert server.asked == 1


@pytest.mark.parametrize(("name", "reason"), [("missing.bin", "Not Found"), ("short.bin", "ended after 1,000 of")])
def test_what_can_not_be_downloaded_is_told_with_its_place_and_nothing_is_left(
    server: Server, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "there.bin").write_bytes(CONTENT)
    files = [remote(server, "there.bin"), remote(server, name), remote(server, "other.bin")]
    with pytest.raises(ValueError, match=f"{name} is not in .* can't be downloaded .*{reason}.*: put ") as caught:
        fetch(files, tmp_path)
    assert str(caught.value).endswith(f"put {files[1].url} and {files[2].url} there")
    assert names(tmp_path) == {"there.bin"}


def test_without_a_network_the_sentence_says_what_to_put_where(tmp_path: Path) -> None:
    # A port that nobody listens on.
    with pytest.raises(ValueError, match=f"data.bin is not in {tmp_path} and can't be downloaded .*refused"):
        fetch([RemoteFile("http://127.0.0.1:9/data.bin", "")], tmp_path)


def test_a_file_that_is_another_is_refused(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="data.bin is damaged, or another file than http"):
        fetch([remote(server, digest="0" * 64)], tmp_path)
    (tmp_path / "data.bin").write_bytes(CONTENT[:-1])
    with pytest.raises(ValueError, match="delete it, or put the right one there"):
        fetch([remote(server)], tmp_path)


def test_a_folder_that_can_not_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="nothing can be written into the folder"):
        fetch([RemoteFile("http://127.0.0.1:9/data.bin", "")], tmp_path / "file")
