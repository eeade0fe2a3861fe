"""Checkpoints that carry their config."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint, Timer
from torch import nn

from project.errors import UserError
from project.notices import Notice
from project.training.checkpoint import BestCheckpoint, ConfigInCheckpoint, best_checkpoint, loading, read_config

CONFIG = {"name": "x", "data": {"batch_size": 4, "shape": [1, 8, 8]}, "scheduler": None}


def saved(path: Path, content: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(content, path)
    return path


def test_the_config_comes_back_as_it_was_stored(tmp_path: Path) -> None:
    checkpoint: dict[str, Any] = {"state_dict": {"w": torch.zeros(2)}}
    ConfigInCheckpoint(CONFIG).on_save_checkpoint(L.Trainer, L.LightningModule, checkpoint)  # type: ignore[arg-type]
    assert read_config(saved(tmp_path / "best.ckpt", checkpoint)) == CONFIG


@pytest.mark.parametrize("at_hand", [["best.ckpt", "last.ckpt"], []])
def test_a_missing_file_is_told_with_those_at_hand(tmp_path: Path, at_hand: list[str]) -> None:
    for name in at_hand:
        saved(tmp_path / name, {})
    with pytest.raises(UserError) as info:
        read_config(tmp_path / "bset.ckpt")
    hint = f", there are {', '.join(at_hand)}" if at_hand else ""
    assert f"bset.ckpt is no file{hint}: type ckpt_path=" in str(info.value)


@pytest.mark.parametrize("place", ["no/such/folder/best.ckpt", "."])
def test_a_path_that_is_no_file_is_told_whatever_it_is(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError, match="is no file"):
        read_config(tmp_path / place)


@pytest.mark.parametrize("kept", [0, 10, 0.5, 0.99])
def test_a_truncated_file_is_told_as_damaged(tmp_path: Path, kept: float) -> None:
    path = saved(tmp_path / "last.ckpt", {"config": CONFIG, "state_dict": {"w": torch.zeros(1000)}})
    whole = path.read_bytes()
    path.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(UserError, match="can't be read, it is damaged or no checkpoint"):
        read_config(path)


class Ran:
    """Its unpickling would leave a file behind."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def test_nothing_in_a_file_is_executed(tmp_path: Path) -> None:
    path = saved(tmp_path / "evil.ckpt", {"config": CONFIG, "x": Ran(tmp_path / "ran")})
    with pytest.raises(UserError, match="can't be read"):
        read_config(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [{"state_dict": {}}, {"config": "text"}, [1, 2], torch.zeros(2)], ids=str)
def test_a_checkpoint_without_a_config_is_told_as_anothers(tmp_path: Path, content: Any) -> None:
    with pytest.raises(UserError, match=r"carries no config, so it was not written by project\.train"):
        read_config(saved(tmp_path / "other.ckpt", content))


def test_another_architecture_is_told_with_the_first_difference() -> None:
    with pytest.raises(UserError, match=r"ckpt_path=a\.ckpt holds another architecture") as info, loading("a.ckpt"):
        nn.Linear(2, 2).load_state_dict(nn.Linear(3, 2).state_dict())
    assert "size mismatch for weight" in str(info.value)
    assert "\n" not in str(info.value)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of memory\nmore"),
        RuntimeError(""),
        RuntimeError(),
        ValueError("Error(s) in loading state_dict"),
    ],
    ids=repr,
)
def test_other_errors_while_loading_pass_through(error: Exception) -> None:
    with pytest.raises(type(error)) as info, loading("a.ckpt"):
        raise error
    assert info.value is error


def callback(path: str, monitor: str | None, score: float | None) -> ModelCheckpoint:
    made = ModelCheckpoint(monitor=monitor)
    made.best_model_path = path
    made.best_model_score = None if score is None else torch.tensor(score)
    return made


@pytest.mark.parametrize(
    ("callbacks", "best"),
    [
        ([], None),
        ([("", "val/loss", None)], None),
        ([("last.ckpt", None, None)], BestCheckpoint("last.ckpt", None)),
        ([("last.ckpt", None, None), ("best.ckpt", "val/loss", 0.5)], BestCheckpoint("best.ckpt", 0.5)),
        ([("a.ckpt", "val/loss", 0.5), ("b.ckpt", "val/f1", 0.25)], BestCheckpoint("a.ckpt", 0.5)),
        ([("last.ckpt", None, None), ("", "val/loss", None)], BestCheckpoint("last.ckpt", None)),
    ],
    ids=["no_callback", "nothing_saved", "last_only", "monitored_first", "first_monitored", "monitored_unsaved"],
)
def test_the_best_checkpoint_is_of_the_first_callback_that_monitors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    callbacks: list[tuple[str, str | None, float | None]],
    best: BestCheckpoint | None,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, *_ in callbacks:
        (tmp_path / (name or "unnamed")).touch()
    with nullcontext() if best or not callbacks else pytest.warns(Notice, match="No checkpoint could be saved"):
        assert best_checkpoint(trainer_with(*callbacks)) == best


def test_a_checkpoint_that_is_not_there_is_passed_over(tmp_path: Path) -> None:
    names = [(str(tmp_path / "best.ckpt"), "val/loss", 0.5), (str(tmp_path / "last.ckpt"), None, None)]
    with pytest.warns(Notice, match="No checkpoint could be saved: what is tested are the last weights"):
        assert best_checkpoint(trainer_with(*names)) is None
    (tmp_path / "last.ckpt").touch()
    assert best_checkpoint(trainer_with(*names)) == BestCheckpoint(str(tmp_path / "last.ckpt"), None)


def test_without_a_batch_to_train_on_no_checkpoint_is_missed() -> None:
    with pytest.warns(Notice, match=r"No batch was trained on .*type trainer\.limit_train_batches=null"):
        assert best_checkpoint(trainer_with(("", None, None), limit=0)) is None


def test_a_training_that_had_no_time_misses_no_checkpoint() -> None:
    with pytest.warns(Notice, match=r"No step was trained .*type a longer trainer\.max_time"):
        assert best_checkpoint(trainer_with(("", None, None), callbacks=[Timer({"seconds": 0})], global_step=0)) is None


def test_a_quick_look_at_the_code_misses_no_checkpoint(recwarn: pytest.WarningsRecorder) -> None:
    assert best_checkpoint(trainer_with(("", None, None), fast_dev_run=3)) is None
    assert not recwarn.list


def trainer_with(*saved: tuple[str, str | None, float | None], limit: float = 1.0, **more: Any) -> Any:
    return SimpleNamespace(
        **{"callbacks": [], "global_step": 1, "fast_dev_run": False, **more},
        limit_train_batches=limit,
        checkpoint_callbacks=[callback(*arguments) for arguments in saved],
        strategy=SimpleNamespace(broadcast=lambda value: value),
    )


class Stores(L.LightningModule):
    def __init__(self, net: Any, size: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()


@pytest.mark.parametrize(
    ("net", "is_read"),
    [
        ({"sizes": [1, 2], "mean": torch.zeros(2), "kind": torch.float16}, True),
        (nn.Linear(1, 1), False),
        (nn.Linear, False),
        ([Path("folder"), SimpleNamespace()], False),
    ],
)
@pytest.mark.filterwarnings("ignore:Attribute 'net'")
def test_hyperparameters_that_cant_be_read_back_are_told_before_training(net: Any, is_read: bool) -> None:
    trainer: Any = SimpleNamespace(checkpoint_callbacks=[ModelCheckpoint()], datamodule=None)
    check = ConfigInCheckpoint(CONFIG).on_fit_start
    if is_read:
        check(trainer, Stores(net))
        return
    with pytest.raises(UserError, match=r'stores net, .*: type self\.save_hyperparameters\(ignore=\["net"\]\)$'):
        check(trainer, Stores(net))
    check(SimpleNamespace(checkpoint_callbacks=[]), Stores(net))  # type: ignore[arg-type]
