"""Hosts that watch each other, and strangers at the port."""

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from project.launch import host_watchdog

TOKEN = bytes(range(host_watchdog.TOKEN_BYTES))
TIMEOUT_S = 0.6


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, list[str]]]:
    """Where rank 0 listens, and the hosts that it has lost."""
    monkeypatch.setattr(host_watchdog, "INTRODUCTION_S", 0.2)
    server = socket.create_server(("127.0.0.1", 0))
    ended, lost = threading.Event(), list[str]()
    arguments = (server, TOKEN, TIMEOUT_S, ended, lost.append)
    thread = threading.Thread(target=host_watchdog._accept, args=arguments, daemon=True)
    thread.start()
    yield server.getsockname()[1], lost
    ended.set()
    thread.join(timeout=5)
    assert not thread.is_alive()


@pytest.mark.parametrize("sent", [b"", TOKEN[:5], b"GET / HTTP/1.1\r\n\r\n", bytes(len(TOKEN)), b"q", b"."])
def test_a_stranger_is_hung_up_on_and_is_no_lost_host(port: tuple[int, list[str]], sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", port[0]), timeout=5) as stranger:
        stranger.sendall(sent)
        with contextlib.suppress(ConnectionResetError):  # closed with something unread
            assert stranger.recv(1) == b""
        time.sleep(2 * TIMEOUT_S)
    assert port[1] == []


def test_a_rank_that_falls_silent_is_a_lost_host(port: tuple[int, list[str]]) -> None:
    with socket.create_connection(("127.0.0.1", port[0]), timeout=5) as rank:
        rank.sendall(TOKEN[:7])
        rank.sendall(TOKEN[7:] + host_watchdog.ALIVE)
        end = time.monotonic() + 10
        while not port[1] and time.monotonic() < end:
            time.sleep(0.05)
        assert rank.recv(1) == host_watchdog.ALIVE
    assert port[1] == ["the host 127.0.0.1"]


def test_a_rank_that_says_goodbye_is_not_lost(port: tuple[int, list[str]]) -> None:
    with socket.create_connection(("127.0.0.1", port[0]), timeout=5) as rank:
        rank.sendall(TOKEN + host_watchdog.GOODBYE)
        time.sleep(2 * TIMEOUT_S)
    assert port[1] == []
