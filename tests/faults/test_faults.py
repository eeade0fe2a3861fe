"""What happens to a run of real processes when one of them fails, and what its user is told."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from faults.kill_and_resume import OPTIONS, differences, last
from interpreters import is_alive

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

LONG = ("++model.sleep_s=0.02", "trainer.max_epochs=50", "callbacks.last.every_n_steps=3", "trainer.devices=2")
IN_OUTPUTS = (*LONG, "paths.run_dir=null")
DIES = (*LONG, "++data.bad=7", "++data.how=dies", "data.num_workers=1")
Start = Callable[..., Any]


def ends(process: psutil.Process, within_s: float) -> bool:
    end = time.monotonic() + within_s
    while is_alive(process):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


@pytest.mark.parametrize("rank", [0, 1])
def test_killed_rank_ends_the_run_and_is_named(start: Start, rank: int) -> None:
    command = start(*LONG, "++model.at=4", f"++model.who={rank}", "++model.what=SIGKILL")
    assert command.wait() == 1
    assert f"rank {rank} was ended by SIGKILL (Linux does that where memory runs out" in command.output()
    assert last(command.folder)["global_step"] == 3  # nothing lost beyond the steps since the last checkpoint


def test_killed_command_takes_its_ranks_along(start: Start) -> None:
    command = start(*LONG)
    command.until_saved()
    ranks = command.ranks()
    assert len(ranks) == 2
    (private,) = {Path(used.path).parent for used in ranks[0].memory_maps() if "project-ranks-" in used.path}
    os.kill(command.pid, signal.SIGKILL)
    assert all(ends(rank, 5) for rank in ranks)
    assert not private.exists()
    assert last(command.folder)["global_step"] >= 3


@pytest.mark.skipif(sys.platform != "linux", reason="a call of Linux")
def test_killed_command_takes_a_stopped_rank_and_the_server_along(tmp_path: Path) -> None:
    """In processes of its own: the server of the other tests outlives their commands."""
    command = [sys.executable, "-m", "project.train", *OPTIONS, *LONG, "paths.run_dir=run"]
    tests = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])}
    with subprocess.Popen(
        command, cwd=tmp_path, env=os.environ | tests, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 90
        while not (tmp_path / "run" / "checkpoints" / "last.ckpt").exists():
            assert process.poll() is None
            assert time.monotonic() < end
            time.sleep(0.05)
        others = psutil.Process(process.pid).children(recursive=True)
        ranks = [rank for rank in others if any("project-ranks-" in used.path for used in rank.memory_maps())]
        assert len(ranks) == 2
        ranks[1].suspend()
        process.kill()
        try:
            assert all(ends(other, 10) for other in others)
        finally:
            for other in others:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.kill()


def test_run_killed_altogether_goes_on(start: Start) -> None:
    command = start(*LONG)
    command.until_saved()
    for process in [psutil.Process(command.pid), *command.ranks()]:
        process.kill()
    command.process.join(5)
    again = start("resume=run", "trainer.max_steps=40", "++model.sleep_s=0")
    assert again.wait(60) == 0, again.output()
    assert last(command.folder)["global_step"] == 40


def test_all_ranks_start_again_when_one_dies(start: Start, tmp_path: Path) -> None:
    options = ("trainer.devices=2", "trainer.max_epochs=3", "launch.max_restarts=2", "callbacks.last.every_n_steps=4")
    command = start(*options, "++model.at=10", "++model.who=1", "++model.what=once")
    assert command.wait(60) == 0, command.output()
    assert "rank 1 was ended by SIGKILL" in command.output()
    assert "All ranks start again from their last checkpoint (restart 1 of 2)." in command.output()
    assert "Going on after step 8 (last.ckpt)" in command.log_of(0)
    assert start(*options, "paths.run_dir=whole").wait(60) == 0
    assert differences(last(tmp_path / "whole"), last(command.folder)) == []


def test_mistake_of_the_user_is_not_tried_again(start: Start) -> None:
    command = start(*LONG, "monitor=val/nothing", "launch.max_restarts=2")
    assert command.wait() == 1
    assert "error: monitor=val/nothing is not among what NoisyModel logs" in command.output()
    assert "start again" not in command.output()


@pytest.mark.parametrize("devices", [1, 2])
def test_mistake_that_shows_before_the_first_step_leaves_no_folder(start: Start, tmp_path: Path, devices: int) -> None:
    command = start(*IN_OUTPUTS, "monitor=val/nothing", f"trainer.devices={devices}")
    assert command.wait() == 1
    assert "error: monitor=val/nothing is not among what NoisyModel logs" in command.output()
    assert not (tmp_path / "outputs").exists()


def test_folders_that_were_there_and_a_chosen_one_stay(start: Start, tmp_path: Path) -> None:
    (tmp_path / "outputs").mkdir()
    assert start(*IN_OUTPUTS, "monitor=val/nothing", "trainer.devices=1").wait() == 1
    assert list((tmp_path / "outputs").iterdir()) == []
    command = start(*LONG, "monitor=val/nothing", "trainer.devices=1")
    assert command.wait() == 1
    assert command.folder.is_dir()
    assert not (command.folder / "config.yaml").exists()  # the same folder can be typed again


@pytest.mark.parametrize("devices", [1, 2])
def test_folder_of_a_run_that_has_trained_stays(start: Start, tmp_path: Path, devices: int) -> None:
    command = start(*IN_OUTPUTS, "++model.at=2", "++model.what=memory", f"trainer.devices={devices}")
    assert command.wait() == 1
    assert "error: memory ran out" in command.output()
    (state,) = tmp_path.glob("outputs/*/*/state.json")
    assert json.loads(state.read_text())["trained"]


def test_exception_before_the_first_step_leaves_its_logs(start: Start, tmp_path: Path) -> None:
    assert start(*IN_OUTPUTS, "++model.at=0", "trainer.devices=1").wait() == 1
    (log,) = tmp_path.glob("outputs/*/*/ranks/rank_0.log")
    assert "RuntimeError: a fault of one rank" in log.read_text()


def test_exception_in_one_rank_ends_all_with_its_traceback(start: Start) -> None:
    began = time.monotonic()
    command = start(*LONG, "++model.at=4", "++model.who=1")
    assert command.wait() == 1
    assert "rank 1 failed first:\nTraceback" in command.output()
    assert "RuntimeError: a fault of one rank" in command.output()
    assert time.monotonic() - began < 25


@pytest.mark.parametrize("workers", [0, 1])
def test_sample_that_cant_be_read_is_named(start: Start, workers: int) -> None:
    command = start(*LONG, "++data.bad=7", f"data.num_workers={workers}")
    assert command.wait() == 1
    assert "RuntimeError: this sample is broken" in command.output() or "this sample is broken" in command.output()
    assert "This happened while sample 7 of NoisyPoints was read." in command.output()


@pytest.mark.parametrize("devices", [1, 2])
def test_sample_of_a_worker_that_died_is_named_without_a_traceback(start: Start, devices: int) -> None:
    command = start(*DIES, f"trainer.devices={devices}")
    assert command.wait() == 1
    assert "error: a worker of the loader died while sample 7 of NoisyPoints was read (" in command.output()
    assert "Traceback" not in command.output()
    assert any("Traceback" in command.log_of(rank) for rank in range(devices))


def test_traceback_of_a_worker_that_died_is_shown_when_asked_for(start: Start) -> None:
    command = start(*DIES, "trainer.devices=1", env={"HYDRA_FULL_ERROR": "1"})
    assert command.wait() == 1
    assert "Traceback" in command.output()
    assert "LostWorkerError: a worker of the loader died while sample 7 of NoisyPoints was read (" in command.output()


def test_memory_that_runs_out_is_told_with_the_batch(start: Start) -> None:
    command = start(*LONG, "++model.at=2", "++model.who=1", "++model.what=memory")
    assert command.wait() == 1
    assert (
        "error: memory ran out with data.batch_size=16 (8 on each of 2 ranks): type data.batch_size=8"
        in command.output()
    )


def test_stopped_rank_is_named_and_the_stacks_of_all_are_written(start: Start) -> None:
    command = start(*LONG, "++model.at=4", "++model.who=1", "++model.what=SIGSTOP", "launch.hang_timeout_s=2")
    assert command.wait() == 1
    assert "rank 1 hangs: it computes in step 4 for" in command.output()
    assert "its process is stopped (SIGSTOP) (rank 0 computes in step 4 for" in command.output()
    for rank in (0, 1):
        assert "(most recent call first)" in command.log_of(rank)
        assert "/project/train.py" in command.log_of(rank)
    assert "in training_step" in command.log_of(1)


@pytest.mark.parametrize(("stage", "at", "does"), [("validate", 0, "validates"), ("test", 20, "tests")])
def test_rank_that_stops_before_the_training_or_after_it_is_named(start: Start, stage: str, at: int, does: str) -> None:
    command = start(
        "trainer.devices=2", "trainer.max_steps=20", f"++model.at={at}", "++model.who=1", "++model.what=SIGSTOP",
        f"++model.stage={stage}", "launch.hang_timeout_s=2", "test=true",
    )  # fmt: skip
    assert command.wait() == 1
    assert f"rank 1 hangs: it {does} in step {at} for" in command.output()
    assert "its process is stopped (SIGSTOP)" in command.output()


def test_rank_that_hangs_starts_again(start: Start) -> None:
    command = start(
        "trainer.devices=2", "trainer.max_epochs=2", "++model.at=4", "++model.who=1", "++model.what=hang_once",
        "launch.hang_timeout_s=5", "launch.max_restarts=1",
    )  # fmt: skip
    assert command.wait(60) == 0, command.output()
    assert "rank 1 hangs" in command.output()
    assert "(restart 1 of 1)" in command.output()


def test_wait_in_vain_names_the_rank_that_is_missing(start: Start) -> None:
    command = start(*LONG, "++model.at=4", "++model.who=1", "++model.what=wait", "launch.timeout_s=4")
    assert command.wait(60) == 1
    assert "a rank waited for others longer than launch.timeout_s" in command.output()
    assert "(missing: rank 1 computes in step 4 for" in command.output()


def test_port_that_is_taken_is_no_obstacle(start: Start) -> None:
    with socket.socket() as taken:
        taken.bind(("localhost", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        command = start("trainer.devices=2", "debug=fast", env={"MASTER_PORT": port, "MASTER_ADDR": "localhost"})
        assert command.wait(60) == 0, command.output()


def test_run_that_is_under_way_cant_be_resumed(start: Start) -> None:
    first = start(*LONG)
    first.until_saved()
    second = start("resume=run")
    assert second.wait() == 1
    assert f"is in use by process {first.pid} on" in second.output()
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait() == 143


def test_two_runs_started_at_the_same_instant_have_folders_of_their_own(start: Start, tmp_path: Path) -> None:
    options = ("debug=fast", "paths.run_dir=null", "paths.outputs=both", "test=false")
    commands = [start(*options), start(*options)]
    assert [command.wait(60) for command in commands] == [0, 0]
    assert len(list(tmp_path.glob("both/*/*/metrics.json"))) == 2


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "small"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def saved_step(folder: Path) -> int:
    """Of ``last.ckpt``, a file or a folder of shards."""
    path = folder / "checkpoints" / "last.ckpt"
    step: int = torch.load(path / "meta.pt" if path.is_dir() else path, weights_only=True)["global_step"]
    return step


@pytest.mark.parametrize(("devices", "strategy"), [(1, "auto"), (2, "ddp"), (2, "fsdp")])
def test_full_disk_is_a_warning_and_the_next_save_is_tried(
    start: Start, small_disk: Path, devices: int, strategy: str
) -> None:
    options = ("++model.sleep_s=0.05", "trainer.max_epochs=8", "callbacks.last.every_n_steps=2")
    options += (f"trainer.devices={devices}", f"trainer/strategy={strategy}")
    command = start(*options, f"paths.run_dir={small_disk}/run")
    command.folder = small_disk / "run"
    command.until_saved()
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(4096)):
            pass
    time.sleep(0.5)
    written = saved_step(command.folder)
    time.sleep(0.3)
    assert saved_step(command.folder) == written  # nothing fits, and what was there stays
    ballast.unlink()
    assert command.wait(60) == 0, command.output()
    assert last(command.folder)["global_step"] == 48 > written
    if devices == 1:
        assert "last.ckpt could not be written (No space left on device, 0 MiB are free): training goes on" in (
            command.output()
        )
    assert not list(small_disk.rglob("*.part"))


def test_read_only_folder_is_told_in_a_sentence(start: Start, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    folder = tmp_path / "fixed"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", folder], check=False)
    if mounted.returncode:
        pytest.skip("mounting a file system is not allowed here")
    try:
        command = start("paths.run_dir=null", f"paths.outputs={folder}/outputs")
        assert command.wait() == 1
        (line,) = command.output().strip().splitlines()[-1:]
        assert line.startswith("error: the run folder")
        assert "type paths.outputs=FOLDER with a folder that you may write to" in line
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def test_ranks_of_torchrun_that_start_again_go_on_in_their_folder(tmp_path: Path) -> None:
    options = (*OPTIONS, "trainer.devices=2", "trainer.max_epochs=3", "++model.at=10", "++model.what=once")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "project.train", *options,
    ]  # fmt: skip
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("outputs/noisy_model/*")
    assert "Going on after step 8 (last.ckpt)" in (folder / "ranks" / "rank_0.log").read_text()
    assert last(folder)["global_step"] == 18
