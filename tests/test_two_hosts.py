"""Ranks on two hosts, which are two network namespaces of this machine."""

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.two_hosts import ADDRESSES, TwoHosts, two_hosts

pytestmark = pytest.mark.slow

SMALL = (
    "trainer.accelerator=cpu",
    "callbacks=none",
    "logger=none",
    "trainer.limit_train_batches=4",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
NODES = ("trainer.num_nodes=2", "trainer.devices=1")


@pytest.fixture
def hosts() -> Iterator[TwoHosts]:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and Debian's package iproute2")
    with two_hosts() as started:
        yield started


def test_two_hosts_train_one_model_together(hosts: TwoHosts, run: Any, tmp_path: Path) -> None:
    processes = [hosts.start_ranks(index, [*SMALL, *NODES, "trainer.max_epochs=1"], tmp_path) for index in (0, 1)]
    try:
        outputs = [process.communicate(timeout=150) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], outputs
    (metrics,) = tmp_path.glob("outputs/*/*/metrics.json")
    found = json.loads(metrics.read_text())["metrics"]
    assert found == pytest.approx(run(*SMALL, "trainer.devices=2", "trainer.max_epochs=1")[1], abs=1e-6)
    assert {path.name for path in (metrics.parent / "ranks").iterdir()} >= {"rank_0.log", "rank_1.log"}


def test_host_that_is_cut_off_ends_the_job_on_both_within_a_minute(hosts: TwoHosts, tmp_path: Path) -> None:
    processes = [
        hosts.start_ranks(index, [*SMALL, *NODES, "trainer.max_epochs=-1", "trainer.max_steps=1000000"], tmp_path)
        for index in (0, 1)
    ]
    try:
        end = time.monotonic() + 120
        while not list(tmp_path.glob("outputs/*/*/state.json")):
            assert all(process.poll() is None for process in processes)
            assert time.monotonic() < end
            time.sleep(0.2)
        time.sleep(2)  # among the steps
        hosts.cut()
        cut_at = time.monotonic()
        outputs = [process.communicate(timeout=90) for process in processes]
        assert time.monotonic() - cut_at < 60
    finally:
        for process in processes:
            process.kill()
    assert all(process.returncode != 0 for process in processes)
    assert f"error: the host {ADDRESSES[1]} has not been heard of for 30 s" in outputs[0][1]
    assert f"error: the host of rank 0 ({ADDRESSES[0]}) has not been heard of for 30 s" in outputs[1][1]
    (state,) = tmp_path.glob("outputs/*/*/state.json")
    assert json.loads(state.read_text())["state"] == "failed"
