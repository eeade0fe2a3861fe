"""Traces of the steps of real ranks: planned, and asked for in a running job."""

import gzip
import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch.profilers import PyTorchProfiler
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from project.errors import UserError
from project.tracking.trace_profiler import check_plan
from project.tracking.traces import TracePlan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

QUICK = (
    "debug=none", "trainer.accelerator=cpu", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false",
    "test=false",
)  # fmt: skip
PLANNED = ("callbacks=profiler", "callbacks.profiler.ranks=all", "trainer.max_steps=12", "callbacks.profiler.wait=3",
           "callbacks.profiler.warmup=1", "callbacks.profiler.active=2")  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def callback_for_ranks() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parent)
        yield


def names_of(path: Path) -> list[str]:
    with gzip.open(path, "rt") as file:
        return [event["name"] for event in json.load(file)["traceEvents"] if "name" in event]


def steps_of(names: list[str]) -> list[int]:
    return sorted(int(name.partition("#")[2]) for name in names if name.startswith("ProfilerStep#"))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "traces").iterdir())


@pytest.mark.parametrize(
    ("strategy", "ranks", "synchronisation"),
    [("ddp", 2, "gloo:all_reduce"), ("fsdp", 2, "gloo:all_gather"), ("dp", 1, "forward")],
)
def test_each_rank_writes_the_asked_steps(run: Any, strategy: str, ranks: int, synchronisation: str) -> None:
    folder, _ = run(*QUICK, *PLANNED, f"trainer/strategy={strategy}", "trainer.devices=2")
    assert files_in(folder) == [f"rank_{rank:03}_step_000004.json.gz" for rank in range(ranks)]
    for name in files_in(folder):
        names = names_of(folder / "traces" / name)
        assert steps_of(names) == [4, 5]
        for phase in ("data", "transfer", "forward", "backward", "optimizer"):
            assert names.count(phase) == 2, phase
        assert any(name.startswith("autograd::engine::evaluate_function") for name in names)
        assert any(synchronisation in name for name in names)
    log = (folder / "ranks" / "rank_0.log").read_text()
    whose = "2 ranks" if ranks == 2 else "rank 0"
    assert f"Trace of steps 4 to 5 of {whose}: {folder}/traces/rank_" in log
    assert "to be opened in https://ui.perfetto.dev" in log
    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    for rank in range(ranks):
        (table,) = events.Tensors(f"trace/rank_{rank:03}/text_summary")
        assert table.step == 4
        assert b"aten::" in table.tensor_proto.string_val[0]


def test_running_job_that_is_asked_traces_the_same_steps_on_the_asked_ranks(run: Any) -> None:
    folder, _ = run(
        *QUICK, "trainer/strategy=ddp", "trainer.devices=2", "trainer.max_steps=120", "trainer.log_every_n_steps=1",
        "callbacks.tracker.interval_s=0.02", "+callbacks.asker._target_=trace_ranks.Asker", "+callbacks.asker.at=10",
        "+callbacks.asker.text='active=2 ranks=all'",
    )  # fmt: skip
    first, second = files_in(folder)
    assert first.startswith("rank_000_step_")
    assert second == first.replace("rank_000", "rank_001")
    steps = [steps_of(names_of(folder / "traces" / name)) for name in (first, second)]
    assert steps[0] == steps[1]
    assert steps[0] == [int(first[14:20]), int(first[14:20]) + 1]
    assert steps[0][0] >= 10
    assert not (folder / "profile").exists()


def test_nothing_is_traced_that_nobody_asked_for(run: Any) -> None:
    folder, _ = run("debug=none", "trainer.max_epochs=3", "trainer.devices=2", "trainer.accelerator=cpu",
                    "callbacks.tracker.interval_s=0.1", "trainer.enable_progress_bar=false")  # fmt: skip
    assert not (folder / "traces").exists()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ranks=[5]", "ranks=[5] of a trace can't be, this run has rank 0: type ranks=all"),
        ("active=2 wait=10000", "Training ended after 40 steps, before a trace that was asked for was complete"),
    ],
)
def test_demand_that_can_not_be_met_is_a_warning(run: Any, text: str, told: str) -> None:
    with pytest.warns(UserWarning, match=re.escape(told)):
        folder, _ = run(
            *QUICK, "trainer.max_steps=40", "trainer.log_every_n_steps=1", "callbacks.tracker.interval_s=0.02",
            "+callbacks.asker._target_=trace_ranks.Asker", "+callbacks.asker.at=10", f"+callbacks.asker.text='{text}'",
        )  # fmt: skip
    assert not (folder / "traces").exists()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("callbacks.profiler.ranks=[2]",), "ranks=[2] of a trace can't be, this run has rank 0"),
        (("callbacks.profiler.active=0",), "active=0 of a trace can't be"),
    ],
)
def test_plan_that_can_not_be_met_is_refused(run: Any, given: tuple[str, ...], told: str) -> None:
    with pytest.raises(UserError) as error:
        run(*QUICK, "callbacks=profiler", *given)
    assert told in str(error.value)


def test_profiler_that_records_already_is_refused() -> None:
    trainer: Any = SimpleNamespace(world_size=1, profiler=PyTorchProfiler())
    with pytest.raises(UserError, match="records all the time with the profiler that traces need"):
        check_plan(TracePlan(), trainer)


def test_plan_that_the_training_is_too_short_for_is_a_warning(run: Any) -> None:
    told = "No trace will be written.*asks for 105 steps, and training has 50: type callbacks.profiler.wait=0"
    with pytest.warns(UserWarning, match=told):
        folder, _ = run(*QUICK, "callbacks=profiler", "callbacks.profiler.wait=100", "trainer.max_steps=50")
    assert not (folder / "traces").exists()


def test_trace_that_can_not_be_written_is_a_warning(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match="The trace of steps 4 to 5 of rank 0 was not written: Not a directory"):
        folder, _ = run(*QUICK, *PLANNED, f"callbacks.profiler.folder={tmp_path}/file/traces")
    assert (folder / "metrics.json").exists()


def test_debugging_by_profile_writes_a_trace(run: Any) -> None:
    folder, _ = run(*QUICK[1:], "debug=profile", "trainer.max_epochs=1")
    assert files_in(folder) == ["rank_000_step_000012.json.gz"]


def test_validation_between_recorded_steps_is_left_out(run: Any) -> None:
    epoch = 19  # steps
    folder, _ = run(*QUICK, "callbacks=profiler", f"callbacks.profiler.wait={epoch - 4}", "callbacks.profiler.active=4",
                    "trainer.max_epochs=2", "model.net.depth=2")  # fmt: skip
    names = names_of(folder / "traces" / f"rank_000_step_{epoch - 2:06}.json.gz")
    assert steps_of(names) == [epoch - 2, epoch - 1, epoch, epoch + 1]
    assert names.count("aten::addmm") == 4 * 3  # as many as there are linear layers


def test_profile_of_several_traces_over_accumulated_batches_counts_steps(run: Any) -> None:
    folder, _ = run(
        *QUICK, *PLANNED, "trainer.accumulate_grad_batches=2", "callbacks.profiler.repeat=2", "callbacks.tracker=null"
    )
    assert files_in(folder) == ["rank_000_step_000004.json.gz", "rank_000_step_000010.json.gz"]
    assert steps_of(names_of(folder / "traces" / "rank_000_step_000010.json.gz")) == [10, 11]
