"""A run that goes on is the run that would have been: weights, curves, best score, to the last bit."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from faults.kill_and_resume import OPTIONS, differences, last, on, rounds, train
from project.errors import UserError
from project.launch import agent
from project.strategies.sharded_checkpoint import consolidate, is_sharded

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(autouse=True, scope="module")
def server() -> None:
    agent.warm_up()


def killed(folder: Path, *overrides: str, step: int = 15) -> None:
    """A run whose last rank was killed in the middle of an epoch, after the checkpoint of step 12."""
    with pytest.raises(agent.RankError, match="SIGKILL"):
        train(folder, *OPTIONS, *overrides, f"++model.at={step}", "++model.what=SIGKILL")


def points(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(tag)]


# With three ranks the order of sums depends on DDP's buckets, of which a new process has others at first.
@pytest.mark.parametrize(("ranks", "workers"), [(1, 0), (1, 2), (2, 0), (2, 2), (3, 0)])
def test_run_killed_inside_an_epoch_ends_as_if_undisturbed(tmp_path: Path, ranks: int, workers: int) -> None:
    # The greatest loss is the best here, and that of the first epoch: from before the run was killed.
    options = (*on(ranks), f"data.num_workers={workers}", "callbacks.last.every_n_steps=5", "mode=max")
    options += ("callbacks.tracker.interval_s=0.01", "trainer.log_every_n_steps=1")
    train(tmp_path / "whole", *OPTIONS, *options)
    killed(tmp_path / "run", *options)
    train(tmp_path / "run", "++model.at=-1")
    assert differences(last(tmp_path / "whole"), last(tmp_path / "run")) == []
    for tag in ("train/loss", "train/lr", "val/loss", "train/hits", "train/mean_loss"):
        whole, run = points(tmp_path / "whole", tag), points(tmp_path / "run", tag)
        assert run == whole, tag
    for run_of in (tmp_path / "run" / "tensorboard").glob("*/"):
        events = EventAccumulator(str(run_of), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            steps = [event.step for event in events.Scalars(tag)]
            assert steps == sorted(set(steps)), (run_of, tag)
    best = [json.loads((tmp_path / name / "metrics.json").read_text())["objective"] for name in ("whole", "run")]
    assert best[0] == best[1] == pytest.approx(points(tmp_path / "whole", "val/loss")[0][1])


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, ("trainer.accumulate_grad_batches=2", "callbacks.last.every_n_steps=2")),
        (1, ("trainer.max_steps=31", "trainer.max_epochs=-1")),
        (2, ("trainer.val_check_interval=5", "trainer.check_val_every_n_epoch=null", "trainer.max_steps=31")),
        (2, ("trainer/strategy=fsdp",)),
    ],
    ids=["accumulation", "steps", "validation_by_steps", "fsdp"],
)
def test_run_killed_at_random_moments_ends_as_if_undisturbed(
    tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    (fact,) = rounds(ranks, 1, tmp_path, ranks, *options)
    assert fact["differences"] == []


@pytest.mark.parametrize("ranks", [1, 2])
def test_deterministic_run_repeats_to_the_last_bit(tmp_path: Path, ranks: int) -> None:
    options = ("trainer.deterministic=true", "seed=1", f"trainer.devices={ranks}")
    for name in ("one", "two"):
        train(tmp_path / name, *OPTIONS, *options)
    assert differences(last(tmp_path / "one"), last(tmp_path / "two")) == []


def test_what_is_typed_wins_and_is_recorded(tmp_path: Path) -> None:
    killed(tmp_path / "run")
    train(tmp_path / "run", "++model.at=-1", "trainer.max_epochs=3")
    assert last(tmp_path / "run")["global_step"] == 18
    config = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    assert (config["trainer"]["max_epochs"], config["data"]["batch_size"]) == (3, 16)
    (line,) = (tmp_path / "run" / "resumed.jsonl").read_text().splitlines()
    assert json.loads(line)["overrides"] == ["++model.at=-1", "trainer.max_epochs=3"]
    assert yaml.safe_load((tmp_path / "run" / "overrides.yaml").read_text())[-1] == "trainer.max_epochs=3"


def test_number_of_ranks_may_change_inside_an_epoch(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    killed(tmp_path / "run", "trainer.devices=2")
    train(tmp_path / "run", "++model.at=-1", "trainer.devices=1")
    assert last(tmp_path / "run")["global_step"] == 36
    log = (tmp_path / "run" / "ranks" / "rank_0.log").read_text()
    assert "Going on after step 12 (last.ckpt)" in log
    assert "Saved by 2 rank(s), the run goes on with 1: the batches are the same" in log


def test_shards_go_on_under_any_strategy_as_one_file_would(tmp_path: Path) -> None:
    killed(tmp_path / "run", "trainer.devices=2", "trainer/strategy=fsdp")
    for strategy, devices in {"auto": 1, "ddp": 2, "dp": 2}.items():
        runs = [shutil.copytree(tmp_path / "run", tmp_path / f"{strategy}_{kind}") for kind in ("shards", "file")]
        assert is_sharded(runs[0] / "checkpoints" / "last.ckpt")
        consolidate(runs[1] / "checkpoints" / "last.ckpt")
        for run in runs:
            train(run, "++model.at=-1", f"trainer.devices={devices}", f"trainer/strategy={strategy}")
            assert "Going on after step 12 (last.ckpt)" in (run / "ranks" / "rank_0.log").read_text()
            assert last(run)["global_step"] == 36
        assert differences(last(runs[0]), last(runs[1])) == []


def test_batches_cant_change_inside_an_epoch(tmp_path: Path) -> None:
    killed(tmp_path / "run", "callbacks.last.every_n_steps=5")
    with pytest.raises(UserError, match=r"data\.batch_size=24 differs from the run's 16.*type data\.batch_size=16"):
        train(tmp_path / "run", "++model.at=-1", "data.batch_size=24")


LOCAL = ("trainer/strategy=ddp_local_sgd", "trainer.strategy.start_step=2", "trainer.strategy.period=3")


def test_local_steps_go_on_at_their_place_between_two_averages(tmp_path: Path) -> None:
    options = (*LOCAL, "trainer.devices=2", "callbacks=default", "model._target_=faults.noisy.PlainSGD")
    train(tmp_path / "whole", *OPTIONS, *options)
    killed(tmp_path / "run", *options)
    train(tmp_path / "run", "++model.at=-1")
    assert differences(last(tmp_path / "whole"), last(tmp_path / "run")) == []
    assert "Going on with rank 0's" not in (tmp_path / "run" / "ranks" / "rank_0.log").read_text()


@pytest.mark.parametrize(
    ("strategy", "told"),
    [
        (LOCAL, "Going on with rank 0's optimizer state on all ranks"),
        (
            ("trainer/strategy=ddp_powersgd", "trainer.strategy.start_step=2"),
            "Going on without the errors that PowerSGD carried over",
        ),
    ],
)
def test_what_ranks_held_and_no_checkpoint_holds_is_told(tmp_path: Path, strategy: Any, told: str) -> None:
    killed(tmp_path / "run", *strategy, "trainer.devices=2", "callbacks=default")
    log = tmp_path / "run" / "ranks" / "rank_0.log"
    assert told not in log.read_text()
    train(tmp_path / "run", "++model.at=-1")
    assert log.read_text().count(told) == 1
    assert last(tmp_path / "run")["global_step"] == 36


def test_damaged_checkpoints_are_told_and_the_one_before_is_taken(tmp_path: Path) -> None:
    train(tmp_path / "whole", *OPTIONS)
    for name, damage in {"truncated": truncate, "flipped": flip}.items():
        killed(tmp_path / name)
        damage(tmp_path / name / "checkpoints" / "last.ckpt")
        train(tmp_path / name, "++model.at=-1")
        log = (tmp_path / name / "ranks" / "rank_0.log").read_text()
        assert "last.ckpt is damaged (" in log
        assert "Going on after step 8 (last-1.ckpt)" in log
        assert differences(last(tmp_path / "whole"), last(tmp_path / name)) == []
        assert (tmp_path / name / "checkpoints" / "last.ckpt.damaged").exists()


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_run_that_is_complete_is_only_taken_up_to_train_longer(tmp_path: Path) -> None:
    train(tmp_path / "run", *OPTIONS, "trainer.max_epochs=2")
    with pytest.raises(UserError, match=r"is complete: type trainer\.max_epochs=N too, with more than its 2"):
        train(tmp_path / "run")
    train(tmp_path / "run", "trainer.max_epochs=4")
    assert last(tmp_path / "run")["global_step"] == 24
    assert [step for step, _ in points(tmp_path / "run", "val/loss")] == [5, 11, 17, 23]


def test_early_stopping_goes_on_counting(tmp_path: Path) -> None:
    options = ("callbacks=early_stopping", "callbacks.early_stopping.min_delta=10", "trainer.max_epochs=20")
    options += ("callbacks.early_stopping.patience=3", "callbacks.last.every_n_steps=4", "callbacks.last.keep=3")
    train(tmp_path / "whole", *OPTIONS, *options)
    killed(tmp_path / "run", *options)
    train(tmp_path / "run", "++model.at=-1")
    assert last(tmp_path / "whole")["global_step"] == last(tmp_path / "run")["global_step"] < 120


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: (run / "config.yaml").unlink(), "holds no run, there is no config.yaml"),
        (lambda run: (run / "config.yaml").write_text("a: 1"), "its config.yaml is another's"),
    ],
)
def test_folder_without_a_run_is_told(tmp_path: Path, change: Callable[[Path], Any], words: str) -> None:
    from project.launch.resume import compose_resumed

    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").touch()
    change(run)
    with pytest.raises(UserError, match=words):
        compose_resumed("train", ["train", f"resume={run}"])
