"""Real ranks, started by torch's elastic agent."""

import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from project.cpu import usable_cores
from project.errors import UserError
from project.launch import agent
from project.launch.heartbeat import Beat, Heartbeats
from project.launch.run import Outcome, Run
from project.launch.stopping import Stopped

pytestmark = pytest.mark.timeout(60)

# What the ranks run: they import it by its name, from sys.path.
MODULE = '''
import json, os, signal, sys, time
from datetime import timedelta
preloaded = "lightning" in sys.modules
import torch
import torch.distributed as dist
from project.errors import UserError
from project.launch.heartbeat import BEAT
from project.launch.run import Outcome


def tell(config, run):
    """Write down what this rank is; all add their rank up, so they are in one group."""
    total = torch.tensor([float(run.rank)])
    if run.world_size > 1:
        dist.all_reduce(total)
    facts = {
        "rank": run.rank, "world_size": run.world_size, "env_rank": int(os.environ["RANK"]),
        "local_rank": int(os.environ["LOCAL_RANK"]), "pid": os.getpid(), "total": total.item(),
        "threads": torch.get_num_threads(), "omp": os.environ.get("OMP_NUM_THREADS"), "config": config,
        "overrides": run.overrides, "preloaded": preloaded, "of_job": os.environ.get("OF_THIS_JOB"),
    }
    (run.folder / f"facts_{run.rank}.json").write_text(json.dumps(facts))
    print(f"hello from {run.rank}", flush=True)
    return Outcome({"rank": float(run.rank)}, objective=total.item(), world_size=run.world_size)


def fail(config, run):
    """The chosen rank fails, while the others wait for it."""
    if run.rank == config["failing"]:
        the_one_that_fails(config["how"])
    dist.all_reduce(torch.ones(1))
    return Outcome({})


def the_one_that_fails(how):
    if how == "error":
        raise RuntimeError("boom")
    if how == "user_error":
        raise UserError("a=1 can't be: type a=2")
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        sys.exit(3)
    if how == "left":
        os._exit(0)


def wait_as_nccl(config, run):
    """The last rank falls silent in step 4; the watchdogs of the others abort them, one after another."""
    BEAT(4, "computes")
    if run.rank == run.world_size - 1:
        signal.pause()
    time.sleep(config["launch"]["timeout_s"] + 0.3 * run.rank)
    os.abort()


def interrupt(config, run):
    if run.rank == 0:
        os.kill(config["launcher"], signal.SIGINT)
    dist.barrier()
    dist.barrier() if run.rank else signal.pause()


def interrupt_while_torch_waits(config, run):
    if run.rank == 1:
        dist.HashStore().wait(["what rank 0 would have said"], timedelta(seconds=100))
    time.sleep(0.5)
    os.kill(config["launcher"], signal.SIGINT)
    signal.pause()
'''

RunRanks = Callable[..., Outcome]


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the module that the ranks import; the server that they are forked from is on its way."""
    agent.warm_up()
    folder = tmp_path_factory.mktemp("functions")
    (folder / "functions_of_ranks.py").write_text(MODULE)
    return folder


def start(functions: Path, folder: Path, name: str, num_ranks: int, **config: Any) -> Outcome:
    config = {
        "launch": {"threads_per_rank": "auto", "timeout_s": 30},
        "trainer": {"accelerator": "cpu", "devices": num_ranks},
    } | config
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(functions)
        run = Run(folder, ["a=1"], {}, started_at=time.time())
        return agent.run_ranks(f"functions_of_ranks:{name}", config, run, num_ranks)


@pytest.fixture
def run_ranks(functions: Path, tmp_path: Path) -> RunRanks:
    """``run_ranks("tell", 2, key=value)``: a function of the module on two ranks."""
    return lambda name, num_ranks, **config: start(functions, tmp_path, name, num_ranks, **config)


def facts(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(folder.glob("facts_*.json"))]


@pytest.fixture(scope="module")
def told(functions: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """The folder and the outcome of a run of three ranks."""
    folder = tmp_path_factory.mktemp("three")
    return folder, start(functions, folder, "tell", 3)


def test_the_outcome_is_that_of_rank_0(told: tuple[Path, Outcome]) -> None:
    assert told[1] == Outcome({"rank": 0.0}, objective=3.0, world_size=3)


def test_each_rank_has_its_number_and_knows_how_many_there_are(told: tuple[Path, Outcome]) -> None:
    ranks = facts(told[0])
    assert [rank["rank"] for rank in ranks] == [0, 1, 2]
    assert [rank["env_rank"] for rank in ranks] == [rank["local_rank"] for rank in ranks] == [0, 1, 2]
    assert {rank["world_size"] for rank in ranks} == {3}
    assert len({rank["pid"] for rank in ranks} | {os.getpid()}) == 4


def test_the_ranks_are_in_one_group(told: tuple[Path, Outcome]) -> None:
    assert [rank["total"] for rank in facts(told[0])] == [0.0 + 1 + 2] * 3


def test_each_rank_gets_the_config_and_the_overrides(told: tuple[Path, Outcome]) -> None:
    for rank in facts(told[0]):
        assert rank["config"]["trainer"] == {"accelerator": "cpu", "devices": 3}
        assert rank["overrides"] == ["a=1"]


def test_each_rank_has_a_log_of_its_own(told: tuple[Path, Outcome]) -> None:
    for number in range(3):
        log = (told[0] / "ranks" / f"rank_{number}.log").read_text()
        assert [line for line in log.splitlines() if "hello" in line] == [f"hello from {number}"]


def test_the_cores_are_shared_fairly(told: tuple[Path, Outcome]) -> None:
    cores = usable_cores()
    for rank in facts(told[0]):
        assert rank["threads"] == (int(rank["omp"]) if rank["omp"] else max(1, cores // 3))


def test_the_ranks_start_with_lightning_imported(told: tuple[Path, Outcome]) -> None:
    assert all(rank["preloaded"] for rank in facts(told[0]))


def test_variables_of_one_job_reach_its_ranks_and_no_others(
    run_ranks: RunRanks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THIS_JOB", "yes")
    run_ranks("tell", 1)
    assert facts(tmp_path)[0]["of_job"] == "yes"
    monkeypatch.delenv("OF_THIS_JOB")
    run_ranks("tell", 1)
    assert facts(tmp_path)[0]["of_job"] is None


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


def environment_now() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}  # its phase changes


@pytest.fixture
def nothing_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Checks that the test leaves environment, signal handlers, import path and temporary files as they were."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.delenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", raising=False)
    environment, handlers, path = environment_now(), [signal.getsignal(s) for s in SIGNALS], list(sys.path)
    yield
    assert list(temporary.iterdir()) == []
    assert environment_now() == environment
    assert [signal.getsignal(s) for s in SIGNALS] == handlers
    assert sys.path == path


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_run_leaves_nothing_behind_and_takes_the_threads_that_are_typed(run_ranks: RunRanks, tmp_path: Path) -> None:
    run_ranks("tell", 1, launch={"threads_per_rank": 3, "timeout_s": 30})
    assert [rank["threads"] for rank in facts(tmp_path)] == [3]


@pytest.mark.usefixtures("nothing_left_behind")
def test_a_failed_run_leaves_nothing_behind_and_the_next_one_works(run_ranks: RunRanks) -> None:
    with pytest.raises(agent.RankError, match="^rank 0 failed first"):
        run_ranks("fail", 2, failing=0, how="error")
    assert run_ranks("tell", 2).objective == 1.0


# The others fail too, because the rank that they wait for is gone; that is not what the user must read.
def test_the_error_of_the_rank_that_failed_first_is_told_with_its_traceback(
    run_ranks: RunRanks, tmp_path: Path
) -> None:
    started = time.monotonic()
    with pytest.raises(agent.RankError) as info:
        run_ranks("fail", 3, failing=1, how="error")
    assert time.monotonic() - started < 15  # not after the timeout of the others' collective, which is 30 s
    text = str(info.value)
    assert text.startswith("rank 1 failed first:\nTraceback")
    assert "in the_one_that_fails" in text
    assert text.endswith("RuntimeError: boom\n")
    assert "RuntimeError: boom" in (tmp_path / "ranks" / "rank_1.log").read_text()


def test_a_users_error_on_a_rank_comes_back_as_one(run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(UserError, match="^a=1 can't be: type a=2$"):
        run_ranks("fail", 2, failing=1, how="user_error")


def test_a_rank_that_is_killed_is_named_with_the_signal_and_its_log(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(agent.RankError) as info:
        run_ranks("fail", 3, failing=2, how="killed")
    assert str(info.value).startswith("rank 2 was ended by SIGKILL")
    assert f"{tmp_path}/ranks/rank_2.log" in str(info.value)


def test_a_rank_that_is_killed_when_all_have_returned_is_named(
    run_ranks: RunRanks, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.elastic.multiprocessing.api import MultiprocessContext

    def is_done(context: Any) -> bool:
        done = len(context._return_values) == context.nprocs
        if done:
            time.sleep(0.5)  # all wait for the launcher's word
            os.kill(context.pids()[1], signal.SIGKILL)
            context._pc.processes[1].join()
        return done

    monkeypatch.setattr(MultiprocessContext, "_is_done", is_done)
    with pytest.raises(agent.RankError, match="^rank 1 was ended by SIGKILL"):
        run_ranks("tell", 2)


def test_the_rank_is_named_that_others_waited_for_which_nccl_has_aborted(run_ranks: RunRanks, tmp_path: Path) -> None:
    with pytest.raises(agent.RankError) as info:
        run_ranks("wait_as_nccl", 3, launch={"threads_per_rank": 1, "timeout_s": 2})
    told = r"rank 0 was ended by SIGABRT: a collective has probably waited in vain for launch.timeout_s=2 "
    assert re.match(told + r"\(missing: rank 2 computes in step 4 for \d s\); its output is in ", str(info.value))


def test_a_rank_that_exits_is_named_with_its_exit_code(run_ranks: RunRanks) -> None:
    with pytest.raises(agent.RankError, match="^rank 1 ended with exit code 3"):
        run_ranks("fail", 2, failing=1, how="exit")


# With one rank and with two: the other may wait for it, or fail since it is gone.
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_rank_that_leaves_as_if_all_were_well_is_named(run_ranks: RunRanks, tmp_path: Path, ranks: int) -> None:
    with pytest.raises(agent.RankError) as info:
        run_ranks("fail", ranks, failing=ranks - 1, how="left")
    assert str(info.value).startswith(f"rank {ranks - 1} ended by itself (exit code 0) in the middle of the run")
    assert f"{tmp_path}/ranks/rank_{ranks - 1}.log" in str(info.value)


def test_a_function_that_cant_be_imported_is_told(run_ranks: RunRanks) -> None:
    with pytest.raises(agent.RankError, match="no attribute 'no_such_function'"):
        run_ranks("no_such_function", 1)


def test_ctrl_c_ends_all_ranks_and_is_told_as_what_it_was(run_ranks: RunRanks) -> None:
    with pytest.raises(Stopped) as info:
        run_ranks("interrupt", 2, launcher=os.getpid())
    assert (info.value.code, info.value.saved) == (130, False)


@pytest.mark.slow
def test_ctrl_c_ends_a_rank_that_waits_for_one_that_has_left(run_ranks: RunRanks) -> None:
    began = time.monotonic()
    with pytest.raises(Stopped):
        run_ranks("interrupt_while_torch_waits", 2, launcher=os.getpid())
    assert time.monotonic() - began < 50, "it was given the time of a rank that saves"


def words(rank: int, time_ns: int, sentence: str | None) -> str:
    return json.dumps({"rank": rank, "time_ns": time_ns, "sentence": sentence, "traceback": f"Traceback of {rank}"})


@pytest.mark.parametrize(("full", "kind"), [("1", agent.RankError), ("0", UserError)])
def test_a_users_error_has_its_traceback_where_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, full: str, kind: type[Exception]
) -> None:
    monkeypatch.setenv("HYDRA_FULL_ERROR", full)
    (tmp_path / "rank_0.json").write_text(words(0, 20, None))
    (tmp_path / "rank_1.json").write_text(words(1, 10, "type a=2"))
    error = agent._first_error(tmp_path, {0: None}, Run(tmp_path, [], {}, started_at=0.0))
    assert type(error) is kind
    assert str(error) == ("type a=2" if kind is UserError else "rank 1 failed first:\nTraceback of 1")


@pytest.mark.parametrize(
    ("sentence", "told"),
    [("a worker of the loader died", "^a worker of the loader died$"), (None, "^rank 1 was ended by SIGABRT;")],
)
def test_a_sentence_of_one_rank_wins_over_the_death_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sentence: str | None, told: str
) -> None:
    """A rank that loses its neighbour may be aborted by what it talks to it with."""
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    (tmp_path / "rank_0.json").write_text(words(0, 20, sentence))
    aborted = SimpleNamespace(exitcode=-signal.SIGABRT)
    error = agent._first_error(tmp_path, {1: aborted}, Run(tmp_path, [], {}, started_at=0.0))
    assert re.search(told, str(error))


def test_a_rank_that_aborts_while_the_others_are_at_work_has_waited_for_none(tmp_path: Path) -> None:
    heartbeats, beat = Heartbeats(tmp_path / "beats", 2), Beat()
    beat.start(heartbeats.path, 1)
    beat(7, "computes")
    aborted = {0: SimpleNamespace(exitcode=-signal.SIGABRT)}
    error = agent._first_error(tmp_path, aborted, Run(tmp_path, [], {}, started_at=0.0), heartbeats, 600)
    assert str(error).startswith("rank 0 was ended by SIGABRT; its output is in")
