"""Several hosts watch each other: one that is cut off would leave the others in a collective that nothing ends."""

from __future__ import annotations

import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from project.errors import UserError
from project.launch import run_state

BEATS = 6  # that a host may miss
AGENT_S = 10.0  # that torchrun has to end by itself
ALIVE, GOODBYE = b".", b"q"
TOKEN_BYTES = 16
INTRODUCTION_S = 5.0  # until a connection has shown that it is a rank's


@contextmanager
def watched(address: str, rank: int, local_rank: int, timeout_s: float, folder: Path) -> Iterator[None]:
    """End this process with a sentence when a host has not been heard of for ``timeout_s``; a collective call.

    The first rank of every host holds a connection to rank 0 at ``address``, over which both send a byte now and then
    from a thread. A host whose network or power is gone closes no connection, and TCP alone would go on trying for a
    quarter of an hour.
    """
    import torch.distributed as dist

    ended = threading.Event()
    console = os.dup(2)  # before the rank's output goes to its log
    server = socket.create_server(("", 0)) if rank == 0 else None
    # Whoever reaches the port may connect: only the ranks know the token, and only who shows it is watched.
    told = [(server.getsockname()[1], secrets.token_bytes(TOKEN_BYTES)) if server else None]
    dist.broadcast_object_list(told, src=0)
    assert told[0] is not None
    port, token = told[0]

    def lose(host: str) -> None:
        if not ended.is_set():
            _end_process(host, timeout_s, folder, console)

    threads = []
    if server is not None:
        threads.append(threading.Thread(target=_accept, args=(server, token, timeout_s, ended, lose), daemon=True))
    elif local_rank == 0:
        connection = socket.create_connection((address, port), timeout=timeout_s)
        connection.sendall(token)
        what = f"the host of rank 0 ({address})"
        threads.append(threading.Thread(target=_watch, args=(connection, what, timeout_s, ended, lose), daemon=True))
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(timeout=2)
        os.close(console)


def _accept(
    server: socket.socket, token: bytes, timeout_s: float, ended: threading.Event, lose: Callable[[str], None]
) -> None:
    """Watch every host that connects and shows the token."""

    def watch(connection: socket.socket, host: str) -> None:
        if _is_introduced(connection, token, ended):
            _watch(connection, f"the host {host}", timeout_s, ended, lose)
        connection.close()

    watching: list[threading.Thread] = []
    with server:
        while not ended.is_set():
            if select.select([server], [], [], 0.2)[0]:
                try:
                    connection, (host, *_) = server.accept()
                except OSError:
                    continue  # gone again
                watching = [thread for thread in watching if thread.is_alive()]
                watching.append(threading.Thread(target=watch, args=(connection, host), daemon=True))
                watching[-1].start()
    for thread in watching:
        thread.join(timeout=1)


def _is_introduced(connection: socket.socket, token: bytes, ended: threading.Event) -> bool:
    """Whether what a connection sends first, and soon, is the token."""
    received = b""
    until = time.monotonic() + INTRODUCTION_S
    while len(received) < len(token) and not ended.is_set():
        if select.select([connection], [], [], 0.2)[0]:
            try:
                more = connection.recv(len(token) - len(received))
            except OSError:
                return False
            if not more:
                return False
            received += more
        elif time.monotonic() > until:
            return False
    return secrets.compare_digest(received, token)


def _watch(
    connection: socket.socket, host: str, timeout_s: float, ended: threading.Event, lose: Callable[[str], None]
) -> None:
    """Send and receive signs of life until one side says goodbye.

    A connection that is closed without is a process that died: its launcher tells of that, and ends the rest.
    """
    heard_at = sent_at = time.monotonic()
    with connection:
        connection.setblocking(False)
        while not ended.is_set():
            if select.select([connection], [], [], 0.2)[0]:
                try:
                    received = connection.recv(64)
                except OSError:
                    return
                if not received or GOODBYE in received:
                    return
                heard_at = time.monotonic()
            now = time.monotonic()
            if now - heard_at > timeout_s:
                lose(host)
                return
            if now - sent_at > timeout_s / BEATS:
                sent_at = now
                try:
                    connection.send(ALIVE)
                except BlockingIOError:
                    continue  # nothing leaves this host
                except OSError:
                    return
        try:
            connection.send(GOODBYE)
        except OSError:
            return


def _end_process(host: str, timeout_s: float, folder: Path, console: int) -> None:
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    try:
        raise UserError(
            f"{host} has not been heard of for {timeout_s:.0f} s: it, or the network between, is gone. From the last "
            f"checkpoint, if there is one, the run goes on with resume={folder}"
        )
    except UserError as error:
        os.write(console, f"error: {error}\n".encode())
        get_error_handler().record_exception(error)  # for torchrun to show
        run_state.record_failure(folder, error)  # last: the folder may lie on what is gone
    finally:
        if "TORCHELASTIC_RUN_ID" in os.environ:
            _end_agent(psutil.Process(os.getppid()))
        os._exit(1)  # the other threads wait for what never comes


def _end_agent(agent: psutil.Process) -> None:
    """Leave a process behind that ends torchrun and its ranks, unless they end by themselves.

    On a host that is cut off from the rendezvous, torchrun waits for it inside of a call that no signal ends.
    """
    if os.fork() == 0:
        os.setsid()
        os.closerange(0, 4096)  # who reads the output of this rank need not wait
        time.sleep(AGENT_S)
        try:
            for process in (*agent.children(recursive=True), agent):
                process.kill()
        except psutil.Error:
            pass  # they have ended
        os._exit(0)
