"""Which checkpoints there are, when they are written, and how a damaged one is known."""

import errno
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from threading import Event
from typing import Any

import lightning as L
import pytest
import torch

from faults.noisy import NoisyData, NoisyModel
from project.errors import UserError
from project.strategies.checkpoint_files import CheckpointFiles, damage, newest, numbered, put, write_file
from project.strategies.checkpoint_order import sort_by_step, stored_step
from project.training.loops import install
from project.training.saving import BestCheckpoints, LastCheckpoint


def fit(folder: Path, *callbacks: L.Callback, **more: object) -> L.Trainer:
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, callbacks=list(callbacks), plugins=[CheckpointFiles()], logger=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder, num_sanity_val_steps=0,
        **more,
    )  # fmt: skip
    install(trainer)
    torch.manual_seed(0)
    trainer.fit(NoisyModel(), datamodule=NoisyData())
    return trainer


def steps(folder: Path) -> dict[str, int]:
    return {path.name: torch.load(path, weights_only=True)["global_step"] for path in sorted(folder.glob("*.ckpt"))}


def test_last_states_are_kept_by_epochs(tmp_path: Path) -> None:
    fit(tmp_path, LastCheckpoint(str(tmp_path), keep=3))
    assert steps(tmp_path) == {"last.ckpt": 24, "last-1.ckpt": 18, "last-2.ckpt": 12}


def test_last_states_are_kept_by_steps_and_the_end_is_always_saved(tmp_path: Path) -> None:
    fit(tmp_path, LastCheckpoint(str(tmp_path), keep=4, every_n_epochs=None, every_n_steps=10))
    assert steps(tmp_path) == {"last.ckpt": 24, "last-1.ckpt": 20, "last-2.ckpt": 10}


def test_epochs_that_follow_one_another_too_fast_are_not_all_saved(tmp_path: Path) -> None:
    fit(tmp_path, LastCheckpoint(str(tmp_path), keep=9, min_gap_s=3600))
    assert steps(tmp_path) == {"last.ckpt": 24}
    fit(tmp_path / "by_steps", LastCheckpoint(str(tmp_path / "by_steps"), keep=9, every_n_steps=10, min_gap_s=3600))
    assert steps(tmp_path / "by_steps") == {"last.ckpt": 24, "last-1.ckpt": 20, "last-2.ckpt": 10}


def test_last_states_are_kept_by_time(tmp_path: Path) -> None:
    fit(tmp_path, LastCheckpoint(str(tmp_path), keep=100, every_n_epochs=None, every_s=1e-6))
    assert set(steps(tmp_path).values()) >= {1, 2, 3, 24}


def fit_scored(
    folder: Path, values: list[float], mode: str, keep: int, *others: L.Callback, ckpt_path: Path | None = None
) -> BestCheckpoints:
    """Four epochs whose validations score these values."""

    class Scored(NoisyModel):
        def on_validation_epoch_end(self) -> None:
            self.log("score", values[self.trainer.current_epoch])

    trainer = L.Trainer(
        accelerator="cpu", max_epochs=4, plugins=[CheckpointFiles()], logger=False, enable_progress_bar=False,
        callbacks=[best := BestCheckpoints(str(folder), "score", mode, keep), *others], num_sanity_val_steps=0,
        enable_model_summary=False, default_root_dir=folder,
    )  # fmt: skip
    install(trainer)
    trainer.fit(Scored(), datamodule=NoisyData(), ckpt_path=ckpt_path)
    return best


@pytest.mark.parametrize("mode", ["min", "max"])
def test_best_states_are_ranked(tmp_path: Path, mode: str) -> None:
    best = fit_scored(tmp_path, [3.0, 1.0, float("nan"), 2.0], mode, keep=3)
    ranked = {"min": [12, 24, 6], "max": [6, 24, 12]}[mode]
    assert steps(tmp_path) == dict(zip(["best.ckpt", "best-1.ckpt", "best-2.ckpt"], ranked, strict=True))
    assert best.scores == sorted([1.0, 2.0, 3.0], reverse=mode == "max")
    assert best.best_model_path == str(tmp_path / "best.ckpt")


class KilledError(Exception):
    pass


class EndsBetweenSaves(LastCheckpoint):
    """Ends a run after a number of epochs when the best state is saved, and the last one is not."""

    def __init__(self, dirpath: str, epochs: int) -> None:
        super().__init__(dirpath)
        self.epochs = epochs

    def _save(self, trainer: L.Trainer, is_last: bool) -> None:
        if trainer.current_epoch >= self.epochs:
            raise KilledError
        super()._save(trainer, is_last)


@pytest.mark.parametrize(
    ("values", "keep"),
    [([2.0, 1.0, 0.0, 3.0], 3), ([2.0, 1.0, 0.0, 3.0], 1), ([0.0, 3.0, 1.0, 2.0], 3), ([3.0, 2.0, 1.0, 0.0], 4)],
    ids=["best", "only", "between", "all"],
)
def test_a_validation_that_is_repeated_ranks_its_state_once(tmp_path: Path, values: list[float], keep: int) -> None:
    for epochs, ckpt_path in ((2, None), (3, tmp_path / "last.ckpt"), (3, tmp_path / "last.ckpt")):
        with pytest.raises(KilledError):
            fit_scored(tmp_path, values, "min", keep, EndsBetweenSaves(str(tmp_path), epochs), ckpt_path=ckpt_path)
        assert (tmp_path / "best.ckpt").exists()
    best = fit_scored(tmp_path, values, "min", keep, LastCheckpoint(str(tmp_path)), ckpt_path=tmp_path / "last.ckpt")
    ranked = sorted(range(4), key=values.__getitem__)[:keep]
    kept = {str(numbered(Path("best.ckpt"), place)): 6 * epoch + 6 for place, epoch in enumerate(ranked)}
    assert {name: step for name, step in steps(tmp_path).items() if name.startswith("best")} == kept
    assert best.scores == [values[epoch] for epoch in ranked]


def test_files_that_a_run_left_after_its_last_state_come_behind_and_gaps_are_closed(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    for number, step in enumerate([9, 4, 8, 2]):
        torch.save({"global_step": step}, numbered(path, number))
    numbered(path, 2).write_text("damaged")
    path.rename(numbered(path, 7))  # as if it had ended while they moved
    (tmp_path / "best-of-all.ckpt").touch()
    assert sort_by_step(path, [2, 8, 4]) == [2, 4]
    assert [stored_step(numbered(path, number)) for number in (0, 1, 3)] == [2, 4, 9]
    assert numbered(path, 2).read_text() == "damaged"
    assert len(list(tmp_path.iterdir())) == 5


@pytest.mark.filterwarnings("ignore:.*could not be written")
@pytest.mark.parametrize(
    ("values", "kept", "at_step"),
    [
        ([1.0, 9.0, 2.0, 0.0], 2.0, 18),  # better than what is there, though not than what was lost
        ([1.0, 0.0, 0.0, 9.0], 1.0, 6),  # the last
    ],
)
def test_best_state_that_could_not_be_written_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, values: list[float], kept: float, at_step: int
) -> None:
    real, written = torch.save, 0

    def save(checkpoint: Any, file: Any) -> None:
        nonlocal written
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(checkpoint, file)

    monkeypatch.setattr(torch, "save", save)
    best = fit_scored(tmp_path, values, "max", keep=1)
    assert best.scores == [kept]
    assert steps(tmp_path) == {"best.ckpt": at_step}


@pytest.mark.filterwarnings("ignore:.*could not be written")
def test_best_state_that_could_not_be_written_does_not_count_after_another_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    best = BestCheckpoints(str(tmp_path), "val/loss")
    fit(tmp_path, best, LastCheckpoint(str(tmp_path)))
    assert (best.best_model_path, best.scores) == ("", [])


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Event]:
    """Nothing is written until it is set."""
    real, event = torch.save, Event()

    def save(checkpoint: Any, file: Any) -> None:
        assert event.wait(30)
        real(checkpoint, file)

    monkeypatch.setattr(torch, "save", save)
    yield event
    event.set()


def test_what_is_written_in_the_background_is_the_state_of_its_moment(tmp_path: Path, held: Event) -> None:
    files, path = CheckpointFiles(), tmp_path / "last.ckpt"
    weight = torch.zeros(3)
    state = {"weight": weight, "tied": weight, "counts": [1]}
    files.save_checkpoint(state, path, {"in_background": True})
    weight.fill_(5)
    state["counts"].append(2)  # type: ignore[union-attr]
    assert not path.exists()
    held.set()
    assert files.wait()
    written = torch.load(path, weights_only=True)
    assert written["weight"].tolist() == [0, 0, 0]
    assert written["weight"].data_ptr() == written["tied"].data_ptr()
    assert written["counts"] == [1]


def test_files_come_in_the_order_in_which_they_were_asked_for(tmp_path: Path, held: Event) -> None:
    files = CheckpointFiles()
    files.save_checkpoint({"step": 1}, tmp_path / "best.ckpt", {"in_background": True})
    files.save_checkpoint({"step": 2}, tmp_path / "last.ckpt", {"in_background": True})
    held.set()
    files.save_checkpoint({"step": 3}, tmp_path / "last.ckpt", {"keep": 2})
    found = {path.name: torch.load(path, weights_only=True)["step"] for path in tmp_path.iterdir()}
    assert found == {"best.ckpt": 1, "last.ckpt": 3, "last-1.ckpt": 2}


def test_an_error_in_the_background_is_not_lost(tmp_path: Path) -> None:
    files = CheckpointFiles()

    def broken(*_: object) -> None:
        raise ValueError("broken")

    files.save(broken, {}, tmp_path / "last.ckpt", {"in_background": True})
    with pytest.raises(ValueError, match="broken"):
        files.teardown()
    assert not any(thread.name.startswith("checkpoints") for thread in threading.enumerate())


def test_no_metric_takes_the_last_as_the_best(tmp_path: Path) -> None:
    fit(tmp_path, BestCheckpoints(str(tmp_path), None))
    assert steps(tmp_path) == {"best.ckpt": 24}


@pytest.mark.parametrize("arguments", [{"keep": 0}, {"every_n_steps": 0}, {"every_n_epochs": 0}, {"every_s": 0}])
def test_interval_that_cant_be_is_told(arguments: dict[str, int]) -> None:
    (name,) = arguments
    with pytest.raises(UserError, match=rf"callbacks\.last\.{name}=0 can't be: type a "):
        LastCheckpoint("folder", **arguments)
    with pytest.raises(UserError, match=r"callbacks\.best\.keep=0 can't be"):
        BestCheckpoints("folder", None, keep=0)


def test_what_is_put_in_moves_the_others_down(tmp_path: Path) -> None:
    path = tmp_path / "best.ckpt"
    for number, (name, place) in enumerate([("a", 0), ("b", 1), ("c", 0), ("d", 1)]):
        written = tmp_path / f"{number}.part"
        if name == "b":  # a folder of shards among files
            written.mkdir()
            (written / "meta").write_text(name)
        else:
            written.write_text(name)
        put(written, path, place, keep=3)
    names = [(numbered(path, n) / "meta" if numbered(path, n).is_dir() else numbered(path, n)) for n in range(3)]
    assert [name.read_text() for name in names] == ["c", "d", "a"]
    assert len(list(tmp_path.iterdir())) == 3


def test_every_flipped_bit_of_a_tensor_is_found(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    torch.save({"weights": torch.arange(4096.0)}, path)
    whole = path.read_bytes()
    assert damage(path) is None
    start = whole.index(torch.arange(4096.0).numpy().tobytes())
    for place in range(start, start + 4 * 4096, 997):
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        assert "the checksum of" in (damage(path) or "")
    for length in (0, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert damage(path) == "it is not whole"


def test_newest_whole_one_is_found_and_what_a_killed_run_left_is_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for number in range(11):
        torch.save({"number": number}, numbered(tmp_path / "last.ckpt", number))
    (tmp_path / "last.ckpt.part").write_text("half")
    for number in (0, 1):
        numbered(tmp_path / "last.ckpt", number).write_text("damaged")
    assert newest(tmp_path) == tmp_path / "last-2.ckpt"
    assert capsys.readouterr().out.count("is damaged (it is not whole)") == 2
    assert not (tmp_path / "last.ckpt.part").exists()
    assert newest(tmp_path / "elsewhere") is None


def test_only_errors_of_the_disk_are_warnings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = CheckpointFiles()

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.warns(UserWarning, match="could not be written .No space left on device, .* training goes on"):
        files.save_checkpoint({}, tmp_path / "last.ckpt")
    assert files.failure
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (Event(), r"mine/0/b in it is an object of threading\.Event: put in plain data"),
        (lambda: None, r"mine/0/b in it is the function .*: put in plain data"),
        (Path, r"mine/0/b in it is the class pathlib\.Path: put in plain data"),
    ],
)
def test_what_cant_be_read_back_is_told_at_the_first_save(tmp_path: Path, value: Any, told: str) -> None:
    with pytest.raises(UserError, match=told):
        CheckpointFiles().save_checkpoint({"a": torch.ones(2), "mine": ({"b": value},)}, tmp_path / "last.ckpt")
    shards = {"a": torch.ones(2)}, {"mine": [{"b": value}]}
    with pytest.raises(UserError, match=f"can't be read back, {told}"):
        CheckpointFiles().save(write_file, shards, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_all_that_torch_reads_back_is_saved(tmp_path: Path) -> None:
    own = {"set": {1, 2}, "size": torch.Size([1]), "type": torch.float16, "order": OrderedDict(a=(1, None)), "z": 1j}
    weight = {"weight": torch.nn.Parameter(torch.ones(2))}
    CheckpointFiles().save_checkpoint({"state_dict": weight, "mine": own}, tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["mine"] == own
