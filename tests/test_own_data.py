"""Pictures, tables and texts of one's own, trained, evaluated and predicted on one and on two ranks."""

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comparison import largest_difference, weights
from pictures import COLOURS, folder_of_pictures, picture

pytestmark = pytest.mark.slow
QUICK = ("trainer.accelerator=cpu", "progress=none", "logger=none", "callbacks.tracker=null")


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_pictures(tmp_path_factory.mktemp("own") / "pictures")


def of_pictures(folder: Path, devices: int) -> list[str]:
    return [
        "experiment=image_folder", f"data.folder={folder}", f"trainer.devices={devices}", "model/net=mlp",
        "data.image_shape=[3,8,8]", "data.batch_size=8", "data/augment=crop_flip", "trainer.max_epochs=4",
        "trainer.precision=64-true", *QUICK,
    ]  # fmt: skip


def test_augmented_pictures_train_to_the_same_weights_on_two_ranks(run: Any, pictures: Path) -> None:
    one, metrics = run(*of_pictures(pictures, 1))
    two, of_two = run(*of_pictures(pictures, 2))
    assert metrics["test/accuracy"] == of_two["test/accuracy"] == 1
    assert largest_difference(weights(one), weights(two)) < 1e-10


def test_new_pictures_are_predicted_as_the_classes_that_were_trained(
    run: Any, run_cli: Any, pictures: Path, tmp_path: Path
) -> None:
    folder, _ = run(*of_pictures(pictures, 1))
    (tmp_path / "new").mkdir()
    for number, colour in enumerate(COLOURS.values()):
        picture(colour, 1000 + number).save(tmp_path / "new" / f"{number}.png")
    assert predictions(run_cli, folder, "data.folder=new", tmp_path) == [0, 1, 2]


def predictions(run_cli: Any, run_folder: Path, data: str, tmp_path: Path) -> list[int]:
    checkpoint = f"ckpt_path={run_folder}/checkpoints/best.ckpt"
    result = run_cli("predict", checkpoint, data, "paths.run_dir=predicted", "trainer.accelerator=cpu")
    assert result.returncode == 0, result.stderr
    with (tmp_path / "predicted" / "predictions.csv").open(newline="") as file:
        return [int(row["prediction"]) for row in csv.DictReader(file)]


def test_a_frozen_backbone_trains_alike_under_strategies(run: Any, pictures: Path) -> None:
    first, _ = run(*of_pictures(pictures, 1))
    common = of_pictures(pictures, 1)
    tuned = [
        *(text for text in common if not text.startswith(("trainer.devices", "trainer.max_epochs"))),
        "callbacks=finetuning", f"callbacks.finetuning.weights={first}/checkpoints/best.ckpt", "trainer.max_epochs=2",
        "scheduler=none",
    ]  # fmt: skip
    one, _ = run(*tuned, "trainer.devices=1")
    start = torch.load(first / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    learned = {name for name, tensor in weights(one).items() if not torch.equal(tensor, start[name])}
    assert learned == {"net.layers.7.weight", "net.layers.7.bias"}
    for strategy in ("ddp", "dp", "fsdp"):
        other, _ = run(*tuned, "trainer.devices=2", f"trainer/strategy={strategy}")
        assert largest_difference(weights(one), weights(other)) < 1e-10, strategy


def test_a_table_trains_alike_on_two_ranks(run: Any) -> None:
    common = ["experiment=tabular_mlp", "model.net.dropout=0", "trainer.max_epochs=8", "trainer.precision=64-true"]
    one, metrics = run(*common, *QUICK, "trainer.devices=1")
    two, of_two = run(*common, *QUICK, "trainer.devices=2")
    assert metrics["test/accuracy"] == of_two["test/accuracy"] > 0.9
    assert largest_difference(weights(one), weights(two)) < 1e-10


def test_published_data_train_on_two_ranks(run: Any, tmp_path: Path) -> None:
    # scikit-learn's digits in the place of MNIST's, enlarged to their size, as arrays that are unpacked already.
    digits = load_digits()
    images = np.pad(digits.images.repeat(3, 1).repeat(3, 2), ((0, 0), (2, 2), (2, 2))) * 15
    for split, rows in {"train": slice(1500), "test": slice(1500, None)}.items():
        np.save(tmp_path / f"{split}_images.npy", images[rows, None].astype(np.uint8))
        np.save(tmp_path / f"{split}_labels.npy", digits.target[rows].astype(np.int64))
    _, metrics = run(
        "experiment=mnist_cnn", f"data.folder={tmp_path}", "trainer.max_epochs=2", "model.net.width=8",
        "data.batch_size=32", "trainer.devices=2", *QUICK,
    )  # fmt: skip
    assert metrics["test/accuracy"] > 0.8


def test_a_number_is_learned_from_a_table_in_its_unit(run: Any) -> None:
    _, metrics = run("experiment=tabular_regression", "trainer.max_epochs=20", *QUICK, "trainer.devices=2")
    assert metrics["test/r2"] > 0.9
    assert metrics["test/rmse"] < 120  # of areas with a standard deviation of 350


def test_rows_without_a_target_are_predicted(run: Any, run_cli: Any, tmp_path: Path) -> None:
    rows = [["size", "colour", "kind"], *([n % 7, "xyz"[n % 3], "ab"[n % 7 > 3]] for n in range(60))]
    for name, part in {"old.csv": rows, "new.csv": [row[:2] for row in rows[:9]]}.items():
        with (tmp_path / name).open("w", newline="") as file:
            csv.writer(file).writerows(part)
    folder, _ = run(
        "experiment=tabular_mlp", f"data.path={tmp_path}/old.csv", "data.target=kind", "data.batch_size=8", *QUICK
    )  # fmt: skip
    assert predictions(run_cli, folder, "data.path=new.csv", tmp_path) == [n % 7 > 3 for n in range(8)]


def test_a_book_trains_on_two_ranks_as_on_one(run_cli: Any, tmp_path: Path) -> None:
    (tmp_path / "book.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    settings = [
        "experiment=text_gpt",
        "data.path=book.txt",
        "data.context=16",
        "data.batch_size=8",
        "data.val_blocks=7",
        "data.test_blocks=9",
        "model.net.width=16",
        "model.net.depth=1",
        "model.sample_bytes=5",
        "trainer.accelerator=cpu",
        "trainer.max_steps=6",
        "trainer.val_check_interval=3",
        "trainer.enable_progress_bar=false",
    ]
    metrics = []
    for devices in (1, 2):
        done = run_cli("train", *settings, f"trainer.devices={devices}", f"paths.run_dir={tmp_path / str(devices)}")
        assert done.returncode == 0, done.stderr
        metrics.append(json.loads((tmp_path / str(devices) / "metrics.json").read_text())["metrics"])
        events = EventAccumulator(str(tmp_path / str(devices) / "tensorboard"))
        events.Reload()
        assert {"train/sample/text_summary", "test/sample/text_summary"} <= set(events.Tags()["tensors"])
    for name in ("val/bits_per_byte", "test/bits_per_byte", "test/perplexity"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-4)
