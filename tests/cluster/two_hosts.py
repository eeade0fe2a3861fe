"""Two hosts on one machine: network namespaces, joined by a pair of virtual Ethernet devices. Needs root."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

ADDRESSES = ("10.77.0.1", "10.77.0.2")


class TwoHosts:
    """Hosts 0 and 1, which see each other and nothing else."""

    def __init__(self) -> None:
        self._names = [f"host{index}-{uuid.uuid4().hex[:6]}" for index in (0, 1)]

    def open(self) -> None:
        """Create both and their link."""
        for name in self._names:
            _ip("netns", "add", name)
        _ip(
            "link",
            "add",
            "eth0",
            "netns",
            self._names[0],
            "type",
            "veth",
            "peer",
            "name",
            "eth0",
            "netns",
            self._names[1],
        )
        for name, address in zip(self._names, ADDRESSES, strict=True):
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", name, "link", "set", device, "up")

    def close(self) -> None:
        """Remove both; processes that still run there keep what they have."""
        for name in self._names:
            with suppress(subprocess.CalledProcessError):
                _ip("netns", "delete", name)

    def start_ranks(self, index: int, arguments: Sequence[str], folder: Path) -> subprocess.Popen[str]:
        """Start one rank on host ``index`` by torchrun: ``python -m project.train`` with these arguments."""
        torchrun = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1",
            "--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", f"{ADDRESSES[0]}:29400",
            # Both hosts have the machine's name, from which torchrun can't tell whose end point that is.
            "--rdzv-conf", f"is_host={1 - index}", "--local-addr", ADDRESSES[index],
            "--log-dir", str(folder / f"torchrun_{index}"),
        ]  # fmt: skip
        return subprocess.Popen(
            ["ip", "netns", "exec", self._names[index], *torchrun, "-m", "project.train", *arguments],
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def cut(self) -> None:
        """Take the cable away."""
        _ip("-n", self._names[1], "link", "set", "eth0", "down")


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    """Two hosts for as long as the context lasts."""
    hosts = TwoHosts()
    try:
        hosts.open()
        yield hosts
    finally:
        hosts.close()


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
