"""What a rank logs, its random numbers and its threads."""

import contextlib
import io
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only

from project.launch import rank
from project.launch.rank import Tee, rank_log
from project.launch.stopping import Stopped
from project.training.seeding import seed_rank


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def logged(*texts: str) -> str:
    """What arrives in the log of what is written to the console, which gets all of it."""
    console, log = Terminal(), io.StringIO()
    tee = Tee(console, log)
    for text in texts:
        assert tee.write(text) == len(text)
    if hasattr(tee, "finish"):  # as rank_log does at the end
        tee.finish()
    assert console.getvalue() == "".join(texts)
    return log.getvalue()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (["a\n"], "a\n"),
        (["a", "b", "\n", "c\nd\n"], "ab\nc\nd\n"),
        (["one\n\ntwo\n"], "one\n\ntwo\n"),
        (["windows\r\n"], "windows\n"),
        (["  indented\n"], "  indented\n"),
    ],
)
def test_whole_lines_reach_the_log_as_they_are(written: list[str], expected: str) -> None:
    assert logged(*written) == expected


def test_colours_do_not_reach_the_log() -> None:
    assert logged("\x1b[1;31merror\x1b[0m: \x1b[38;5;9mred\x1b[39m\n") == "error: red\n"


def test_of_a_progress_bar_only_the_last_drawing_reaches_the_log() -> None:
    redrawn = [f"\rEpoch 0: {percent}%|" for percent in range(0, 101, 10)]
    assert logged("begin\n", *redrawn, "\n", "end\n") == "begin\nEpoch 0: 100%|\nend\n"


def test_a_bar_that_erases_itself_leaves_nothing_in_the_log() -> None:
    assert logged("\rSanity: 50%", "\r           \r", "\n") in ("", "\n")


UP = "\r\x1b[2K\x1b[1A\x1b[2K"  # as rich begins to draw a bar of two lines again


def test_of_a_bar_of_several_lines_only_the_first_and_the_last_drawing_reach_the_log() -> None:
    # Lightning's bars for an epoch and its validation.
    drawings = [f"{UP if step else ''}Epoch 0 {step}/9\nValidation {step}/9" for step in range(10)]
    log = logged("begin\n", *drawings, "\n", "end\n")
    assert log == "begin\nEpoch 0 0/9\nEpoch 0 9/9\nValidation 9/9\nend\n"


def test_a_line_printed_above_a_bar_of_several_lines_reaches_the_log() -> None:
    bar = "Epoch 1/9\nValidation 1/9"
    log = logged(bar, f"{UP}{bar}", f"{UP}printed\n{bar}", f"{UP}{bar}", f"{UP}{bar}", "\n")
    assert log.splitlines().count("printed") == 1
    assert log.splitlines().count("Epoch 1/9") == 3  # the first, the one below what is printed, and the last


def test_the_console_answers_for_the_tee() -> None:
    assert Tee(Terminal(), io.StringIO()).isatty()
    assert not Tee(io.StringIO(), io.StringIO()).isatty()
    assert Tee(sys.__stdout__, io.StringIO()).encoding == sys.__stdout__.encoding  # type: ignore[arg-type,union-attr]


def test_what_is_written_as_a_list_of_lines_reaches_the_log() -> None:
    tee = Tee(io.StringIO(), log := io.StringIO())
    tee.writelines(["a\n", "b\n"])
    if hasattr(tee, "finish"):
        tee.finish()
    assert log.getvalue() == "a\nb\n"


def test_rank_0_is_seen_on_the_console_and_in_its_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout, sys.stderr
    with rank_log(tmp_path, 0, own_console=True):
        print("out")
        print("err", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == before
    assert capsys.readouterr() == ("out\n", "err\n")
    assert (tmp_path / "ranks" / "rank_0.log").read_text() == "out\nerr\n"


def test_a_line_without_an_end_reaches_the_log_at_the_end(tmp_path: Path) -> None:
    with rank_log(tmp_path, 0, own_console=True):
        print("no end of line", end="")
    assert (tmp_path / "ranks" / "rank_0.log").read_text().rstrip("\n") == "no end of line"


def test_an_error_of_rank_0_is_in_its_log_with_its_traceback(tmp_path: Path) -> None:
    before = sys.stdout, sys.stderr
    with pytest.raises(RuntimeError, match="boom"), rank_log(tmp_path, 0, own_console=True):
        raise RuntimeError("boom")
    assert (sys.stdout, sys.stderr) == before
    log = (tmp_path / "ranks" / "rank_0.log").read_text()
    assert log.startswith("Traceback")
    assert log.endswith("RuntimeError: boom\n")


def test_a_log_is_continued_not_begun_anew(tmp_path: Path) -> None:
    for text in ("first", "second"):
        with rank_log(tmp_path, 0, own_console=True):
            print(text)
    assert (tmp_path / "ranks" / "rank_0.log").read_text() == "first\nsecond\n"


@pytest.mark.parametrize("tell_errors", [True, False])
def test_other_ranks_are_in_their_log_alone_but_for_errors_if_told(tmp_path: Path, tell_errors: bool) -> None:
    # In a process of its own, because its file descriptors are turned over for good; without Lightning, whose
    # import takes seconds.
    code = f"""
import os
from pathlib import Path
from project.launch import rank
rank.quiet_libraries = lambda: None
with rank.rank_log(Path({str(tmp_path)!r}), 1, own_console=False, tell_errors={tell_errors}):
    print('by Python')
    os.system('echo by another program')
    raise RuntimeError('boom')
"""
    done = subprocess.run([sys.executable, "-u", "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout == ""
    assert done.stderr.startswith("rank 1 failed:\nTraceback") == tell_errors
    log = (tmp_path / "ranks" / "rank_1.log").read_text()
    assert log.startswith("by Python\nby another program\nTraceback")
    assert log.count("RuntimeError: boom") >= 1


@pytest.fixture
def numbers_restored() -> Iterator[None]:
    states = torch.get_rng_state(), np.random.get_state(), random.getstate()
    yield
    torch.set_rng_state(states[0])
    np.random.set_state(states[1])
    random.setstate(states[2])


def drawn(seed: int, rank: int) -> tuple[float, float, float]:
    seed_rank(seed, rank)
    return torch.rand(1).item(), float(np.random.rand()), random.random()


@pytest.mark.usefixtures("numbers_restored")
def test_a_rank_draws_the_same_numbers_again() -> None:
    assert drawn(7, 3) == drawn(7, 3)


@pytest.mark.usefixtures("numbers_restored")
def test_ranks_and_neighbouring_seeds_draw_different_numbers_from_each_source() -> None:
    draws = [drawn(seed, rank) for seed in range(4) for rank in range(8)]
    for source in zip(*draws, strict=True):
        assert len(set(source)) == len(draws)


@pytest.mark.usefixtures("numbers_restored")
def test_the_largest_seed_works_on_any_rank() -> None:
    assert drawn(2**32 - 1, 1023) != drawn(2**32 - 1, 1022)


def test_a_command_is_found_by_module_and_name() -> None:
    assert rank.load("project.launch.rank:faults_explained") is rank.faults_explained


@pytest.mark.parametrize(
    ("environment", "kind"),
    [
        ({}, "LightningEnvironment"),
        ({"SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}, "LightningEnvironment"),  # an idle SLURM shell
        ({"TORCHELASTIC_RUN_ID": "x", "RANK": "0"}, "TorchElasticEnvironment"),
        ({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}, "SLURMEnvironment"),
    ],
)
def test_lightning_is_told_who_started_the_ranks(
    environment: dict[str, str], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with rank.environment_restored():  # SLURM_NTASKS_PER_NODE would be read by the next srun
        found = rank.cluster_environment()
    assert type(found).__name__ == kind
    # Lightning's own handler would put the job into the queue again and train on.
    assert getattr(found, "auto_requeue", False) is False


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What becomes of the process group of two ranks, of which this is the first."""
    done: list[str] = []
    environment = SimpleNamespace(
        world_size=lambda: 2, global_rank=lambda: 0, local_rank=lambda: 0, main_address="localhost", main_port=1
    )
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCH_FR_BUFFER_SIZE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(rank_zero_only, "rank", 0)
    monkeypatch.setattr(rank, "cluster_environment", lambda: environment)
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: done.append("joined"))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: done.append("left"))
    monkeypatch.setattr(rank.atexit, "register", lambda function, _: done.append("ends at once"))
    return done


def trained(accelerator: str, error: BaseException | None, done: list[str]) -> list[str]:
    config = {"trainer": {"accelerator": accelerator, "devices": 2}, "launch": {"timeout_s": 1}}
    with contextlib.suppress(RuntimeError, Stopped), rank.process_group(config):
        done.append("trained")
        if error is not None:
            raise error
    return done


STOPPED_BY_ALL = Stopped(15, by_all=True)


@pytest.mark.parametrize("error", [None, RuntimeError("boom"), STOPPED_BY_ALL, Stopped(15)])
def test_the_process_group_is_left_whatever_happens(done: list[str], error: BaseException | None) -> None:
    """A group that is alive at the end of its process can abort it."""
    assert trained("cpu", error, done) == ["joined", "trained", "left"]


@pytest.mark.parametrize(
    ("error", "end"),
    [(None, "left"), (STOPPED_BY_ALL, "left"), (RuntimeError("boom"), "ends at once"), (Stopped(15), "ends at once")],
)
def test_a_rank_that_fails_alone_does_not_wait_for_the_others_to_leave_nccls_group(
    done: list[str], error: BaseException | None, end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 0, "set_device": None}.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert trained("cuda", error, done) == ["joined", "trained", end]


@pytest.mark.parametrize(("error", "code"), [("Stopped(15)", 143), ("KeyboardInterrupt()", 130), ("OSError()", 1)])
def test_a_process_that_ends_at_once_runs_nothing_more_and_keeps_its_exit_code(error: str, code: int) -> None:
    lines = (
        "import atexit, sys; from project.launch import rank; from project.launch.stopping import Stopped",
        "atexit.register(print, 'too late')",
        f"atexit.register(rank._end_at_once, {error})",
        "print('told'); sys.exit(3)",
    )
    ended = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (code, "told\n")
