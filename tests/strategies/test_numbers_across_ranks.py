"""What must not depend on the number of ranks, what must differ between them, and what ranks must do together."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch

from comparison import Run, largest_difference, weights
from project.errors import UserError

pytestmark = pytest.mark.slow

OWN = (
    "data._target_=combination_models.Named",
    "data.batch_size=32",
    "model._target_=combination_models.Plain",
    "scheduler=none",
    "monitor=val/loss",
    "mode=min",
    "trainer.accelerator=cpu",
    "trainer.precision=64-true",
    "trainer.max_epochs=2",
    "logger=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)


@pytest.fixture(autouse=True)
def own_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parent)
    monkeypatch.syspath_prepend(Path(__file__).parents[1])


def notes(folder: Path) -> list[list[dict[str, Any]]]:
    """Of each rank, step by step."""
    return [json.loads(path.read_text()) for path in sorted(folder.glob("notes_*.json"))]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_random_numbers_differ_by_rank_epoch_and_worker_and_come_again_with_the_seed(
    run: Run, num_workers: int
) -> None:
    typed = (*OWN, "data._target_=combination_models.Dice", "model._target_=combination_models.Gambler")
    typed = (*typed, f"data.num_workers={num_workers}", "trainer.devices=2")
    first = notes(run(*typed)[0])
    assert len(first) == 2
    assert first[1][0]["workers"] == multiprocessing.get_start_method()  # as on one device, not as ranks are started
    for source in ("data", "step"):
        drawn = [number for rank in first for step in rank for number in step[source]]
        assert len(drawn) == 2 * 2 * 8 * 3 * (16 if source == "data" else 1)  # ranks, epochs, steps, sources, samples
        assert len(set(drawn)) == len(drawn), source
    assert notes(run(*typed, "hparams=[]")[0]) == first
    assert notes(run(*typed, "seed=1")[0]) != first


@pytest.mark.parametrize("shuffle", [True, False])
def test_samples_come_in_the_same_order_whatever_the_ranks(run: Run, shuffle: bool) -> None:
    typed = (*OWN, "data._target_=combination_models.Dice", "model._target_=combination_models.Gambler")
    orders = []
    for spread in ("auto trainer.devices=1", "auto trainer.devices=2", "dp trainer.devices=2"):
        folder, _ = run(*typed, f"data.shuffle={shuffle}", *f"trainer/strategy={spread}".split())
        steps = zip(*notes(folder), strict=True)
        orders.append([[name for rank in step for name in rank["names"]] for step in steps])
    assert all(order == orders[0] for order in orders)
    assert (orders[0][0] == [f"number {index}" for index in range(32)]) == (not shuffle)
    assert (orders[0][:8] == orders[0][8:]) == (not shuffle)  # the second epoch
    # Ranks of tensor parallel read the same batch, which is the one that a single device takes.
    folder, _ = run(*typed, f"data.shuffle={shuffle}", "trainer/strategy=tensor_parallel", "trainer.devices=2")
    left, right = ([step["names"] for step in rank] for rank in notes(folder))
    assert left == right == orders[0]


@pytest.mark.parametrize(
    ("strategy", "scheduler"),
    [("ddp", "one_cycle"), ("ddp", "warmup_cosine"), ("dp", "one_cycle"), ("fsdp", "one_cycle")],
)
def test_schedules_are_as_long_as_the_run_whatever_the_ranks(run: Run, strategy: str, scheduler: str) -> None:
    typed = (*OWN, "data=digits", "model=image_classifier", "model._target_=project.models.ImageClassifier")
    typed = (*typed, "data._target_=project.data.DigitsDataModule", f"scheduler={scheduler}")
    typed = (*typed, "trainer.accumulate_grad_batches=4", "trainer.log_every_n_steps=1")
    one, one_metrics = run(*typed)
    many, many_metrics = run(*typed, f"trainer/strategy={strategy}", "trainer.devices=2")
    assert many_metrics["train/lr"] == pytest.approx(one_metrics["train/lr"], rel=1e-12)
    last = torch.load(many / "checkpoints" / "last.ckpt", weights_only=True)
    assert last["lr_schedulers"][0]["last_epoch"] == last["global_step"] == 18  # of 39 batches, 36 fill a step
    assert one_metrics["train/lr"] < 1e-3 * 0.003 or scheduler == "warmup_cosine"
    assert largest_difference(weights(one), weights(many)) <= 1e-10


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_the_number_of_classes_reaches_the_net_from_the_data(run: Run, strategy: str) -> None:
    small = (
        "data=synthetic",
        "data.length=64",
        "data.val_length=16",
        "data.test_length=16",
        "data.image_shape=[1,8,8]",
    )
    typed = (*small, "data.num_classes=6", "debug=fast", "logger=none", "trainer.accelerator=cpu", "model.net.width=8")
    folder, _ = run(*typed, f"trainer/strategy={strategy}", "trainer.devices=2")
    assert len(list(weights(folder).values())[-1]) == 6


@pytest.mark.parametrize("data", ["Endless", "PlainStream"])
def test_a_stream_that_each_rank_would_read_whole_is_refused(run: Run, data: str) -> None:
    with pytest.raises(UserError, match="iterable dataset.*give it __len__ and __getitem__"):
        run(*OWN, f"data._target_=combination_models.{data}", "trainer.devices=2")


def test_a_schedule_that_follows_a_value_of_each_rank_is_refused(run: Run) -> None:
    typed = (*OWN, "model._target_=combination_models.Unsynchronised", "monitor=val/agreed", "trainer.devices=2")
    with pytest.raises(UserError, match=r"monitor=val/loss differs between the ranks.*sync_dist=True"):
        run(*typed)
    run(*typed, "trainer.devices=1")


def test_ranks_that_wait_for_one_another_in_vain_end_and_say_so(run: Run) -> None:
    typed = (*OWN, "model._target_=combination_models.AloneInAMetric", "trainer.devices=2")
    with pytest.raises(UserError, match=r"longer than launch\.timeout_s.*type launch\.timeout_s=3600"):
        run(*typed, "launch.timeout_s=5")
