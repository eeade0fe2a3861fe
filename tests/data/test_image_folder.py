"""Pictures of any kind in folders of classes."""

import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from pictures import COLOURS, folder_of_pictures, picture
from project.data import ImageFolder, image_folder
from project.data.image_folder import decode
from project.data.loaders import SampleError
from project.errors import sentence

PLAIN: dict[str, Any] = {"image_shape": (3, 8, 8), "mean": [0.0] * 3, "std": [1 / 255] * 3, "batch_size": 4}


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of_pictures(tmp_path_factory.mktemp("own") / "pictures")


def module(folder: Path, **arguments: Any) -> ImageFolder:
    return ImageFolder(str(folder), **PLAIN | arguments)


def loaded(folder: Path, stage: str | None = None, **arguments: Any) -> ImageFolder:
    datamodule = module(folder, **arguments)
    datamodule.setup(stage)
    return datamodule


def paths(datamodule: ImageFolder, split: str) -> list[str]:
    """Relative to the folder, with their labels behind them."""
    dataset = getattr(datamodule, f"{split}_set")
    found = [Path(path).relative_to(datamodule.folder).as_posix() for path in dataset.read.paths]
    return [f"{path} {label}" for path, label in zip(found, dataset.label.tolist(), strict=True)]


def test_every_picture_is_in_one_split_and_each_class_in_all(pictures: Path) -> None:
    datamodule = loaded(pictures)
    splits = [paths(datamodule, split) for split in ("train", "val", "test")]
    assert [len(split) for split in splits] == [42, 9, 9]
    expected = {f"{name}/{number:03d}.png {label}" for label, name in enumerate(COLOURS) for number in range(20)}
    assert set().union(*splits) == expected
    for split in splits:
        assert {line.rpartition(" ")[2] for line in split} == {"0", "1", "2"}
    assert paths(loaded(pictures), "test") == splits[2]
    assert paths(loaded(pictures, seed=1), "test") != splits[2]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_batch_is_what_the_nets_expect(pictures: Path, num_workers: int) -> None:
    batch = next(iter(loaded(pictures, num_workers=num_workers).train_dataloader()))
    assert batch["image"].shape == (4, 3, 8, 8)
    assert batch["image"].dtype == torch.float32
    colours = torch.tensor(list(COLOURS.values()))[batch["label"]]
    assert (batch["image"].mean((2, 3)) - colours).abs().max() < 20


def test_facts_are_the_class_folders_and_a_given_order_holds(pictures: Path) -> None:
    assert module(pictures).facts() == {"classes": ["blue", "green", "red"], "num_classes": 3}
    ordered = loaded(pictures, classes=["red", "green", "blue"])
    assert {line.partition("/")[0] + line[-1] for line in paths(ordered, "train")} == {"red0", "green1", "blue2"}


@pytest.mark.parametrize("val", ["val", "valid", "validation"])
def test_folders_of_splits_are_taken_and_what_is_missing_is_drawn_from_train(
    pictures: Path, tmp_path: Path, val: str
) -> None:
    shutil.copytree(pictures, tmp_path / "train")
    for name in COLOURS:
        (tmp_path / val / name / "deeper").mkdir(parents=True)
        shutil.copy(pictures / name / "001.png", tmp_path / val / name / "deeper" / "X.PNG")
    datamodule = loaded(tmp_path)
    assert paths(datamodule, "val") == [f"{val}/{name}/deeper/X.PNG {label}" for label, name in enumerate(COLOURS)]
    assert len(paths(datamodule, "train")) == 51
    assert len(paths(datamodule, "test")) == 9
    assert not set(paths(datamodule, "test")) & set(paths(datamodule, "train"))


def test_hidden_files_and_files_of_other_kinds_are_left_out(tmp_path: Path) -> None:
    folder_of_pictures(tmp_path)
    for name in (".hidden.png", "Thumbs.db", "notes.txt"):
        (tmp_path / "red" / name).write_text("no picture")
    (tmp_path / ".cache").mkdir()
    assert len(paths(loaded(tmp_path), "train")) == 42


def palette_picture() -> Image.Image:
    made = Image.new("P", (30, 20), 1)
    made.putpalette([200, 200, 200, 10, 20, 30])
    return made


@pytest.mark.parametrize(
    ("make", "colour"),
    [
        (lambda p: Image.new("L", (30, 20), 90).save(p), (90, 90, 90)),
        (lambda p: Image.new("1", (30, 20), 1).save(p), (255, 255, 255)),
        (lambda p: Image.new("RGBA", (30, 20), (200, 0, 0, 0)).save(p), (255, 255, 255)),
        (lambda p: Image.new("RGBA", (30, 20), (200, 100, 50, 255)).save(p), (200, 100, 50)),
        (lambda p: Image.new("LA", (30, 20), (80, 255)).save(p), (80, 80, 80)),
        (lambda p: palette_picture().save(p), (10, 20, 30)),
        (lambda p: palette_picture().save(p, transparency=1), (255, 255, 255)),
        (lambda p: Image.fromarray(np.full((20, 30), 130 * 256, np.uint16)).save(p), (130, 130, 130)),
    ],
    ids=["grey", "black and white", "transparent", "opaque", "grey with alpha", "palette", "clear palette", "16 bits"],
)
def test_pictures_of_any_mode_are_read(tmp_path: Path, make: Any, colour: tuple[int, int, int]) -> None:
    path = tmp_path / "x.png"
    make(path)
    for shape in ((3, 4, 6), (1, 4, 6)):
        image = decode(path, shape)
        assert image.shape == shape
        assert image.dtype == torch.uint8
    image = decode(path, (3, 4, 6))
    assert image.flatten(1).unique(dim=1).flatten().tolist() == list(colour)


@pytest.mark.parametrize("suffix", ["bmp", "gif", "jpg", "ppm", "tif", "webp"])
def test_pictures_of_any_format_are_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"x.{suffix}"
    picture((200, 80, 40), 0, (64, 48)).save(path)
    assert (decode(path, (3, 8, 8)).float().mean((1, 2)) - torch.tensor([200, 80, 40])).abs().max() < 20


def test_a_picture_covers_the_shape_and_its_middle_is_kept(tmp_path: Path) -> None:
    stripes = np.repeat(np.array([0, 100, 200], np.uint8), 10)[None].repeat(10, 0)  # 10 high, 30 wide
    Image.fromarray(stripes).save(tmp_path / "x.png")
    assert decode(tmp_path / "x.png", (1, 5, 5))[:, :, 1:4].unique().tolist() == [100]  # the outer ones lie at an edge
    assert decode(tmp_path / "x.png", (1, 10, 30)).equal(torch.from_numpy(stripes)[None])


def test_a_picture_that_a_camera_took_on_its_side_stands_upright(tmp_path: Path) -> None:
    upright = np.zeros((40, 40), np.uint8)
    upright[:20] = 255
    lying = Image.fromarray(np.rot90(upright))
    exif = lying.getexif()
    exif[0x0112] = 6  # to be turned by 90 degrees
    lying.save(tmp_path / "x.jpg", exif=exif)
    shown = decode(tmp_path / "x.jpg", (1, 4, 4))
    assert shown[0, 0].min() > 200
    assert shown[0, -1].max() < 50


def damaged(folder: Path, content: bytes | None) -> Path:
    folder_of_pictures(folder)
    path = folder / "green" / "007.png"
    path.write_bytes(path.read_bytes()[:200] if content is None else content)
    return path


def told_of(folder: Path, num_workers: int) -> str | None:
    """The sentence with which reading all pictures fails."""
    datamodule = loaded(folder, stage="validate", num_workers=num_workers, test_fraction=0.0, batch_size=3)
    try:
        for loader in (datamodule.train_dataloader(), datamodule.val_dataloader()):
            for _ in loader:
                pass
    except SampleError as error:
        text = sentence(error)
        error.__traceback__ = None  # it leads to the loader, whose workers end with it
        return text
    return "nothing failed"


@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("content", [None, b"", b"no picture", b"\x89PNG\r\n\x1a\n"])
def test_a_damaged_file_is_named_in_a_sentence_by_workers_too(
    tmp_path: Path, content: bytes | None, num_workers: int
) -> None:
    path = damaged(tmp_path, content)
    text = told_of(tmp_path, num_workers) or ""
    assert re.fullmatch(rf"{path} can't be read \(.+\): mend it, or take it out of the folder", text)


def test_pictures_alone_can_be_predicted_in_the_order_of_their_names(pictures: Path) -> None:
    datamodule = loaded(pictures / "red", stage="predict", classes=list(COLOURS))
    (batch,) = module_batches(datamodule)
    assert batch.keys() == {"image"}
    assert paths(datamodule, "test") == [f"{number:03d}.png -1" for number in range(20)]


def module_batches(datamodule: ImageFolder) -> list[dict[str, Tensor]]:
    datamodule.batch_size = 100
    return list(datamodule.predict_dataloader())


def test_all_pictures_can_be_for_the_test(pictures: Path) -> None:
    datamodule = loaded(pictures, stage="test", val_fraction=0.0, test_fraction=1.0)
    assert len(paths(datamodule, "test")) == 60
    with pytest.raises(ValueError, match="no picture in .* is for train"):
        loaded(pictures, stage="fit", val_fraction=0.0, test_fraction=1.0)


def make_folders(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).mkdir(parents=True)
        picture((0, 0, 0), 0).save(root / name / "0.png")
    return root


@pytest.mark.parametrize(
    ("prepare", "arguments", "words"),
    [
        (lambda root: root / "nowhere", {}, "nowhere is no folder: type data.folder="),
        (lambda root: root, {}, "holds no folders, but each class needs a folder"),
        (lambda root: root, {"classes": ["a", "b"]}, "holds no folders, but each class needs a folder"),
        (lambda root: make_folders(root, "one"), {}, "holds the folder one alone, but each class needs a folder"),
        (lambda root: make_folders(root, "a", "b"), {"classes": ["a", "c"]}, "holds the folder b, which is none of"),
        (lambda root: make_folders(root, "a", "b"), {"num_classes": 3}, "type data.num_classes=2"),
        (lambda root: make_folders(root, "train/a", "train/b", "val/c"), {}, "the folder c, which is none of"),
        (lambda root: make_folders(root, "a", "b"), {}, "no picture in .* is for val: add some"),
    ],
)
def test_folders_of_another_form_are_told(tmp_path: Path, prepare: Any, arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        loaded(prepare(tmp_path), **arguments)


def test_a_class_without_pictures_is_told(tmp_path: Path) -> None:
    make_folders(tmp_path, "a", "b")
    (tmp_path / "c").mkdir()
    with pytest.raises(ValueError, match=f"{tmp_path / 'c'} holds no picture"):
        loaded(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"image_shape": (2, 8, 8)}, r"type data.image_shape=\[3,64,64\]"),
        ({"val_fraction": 0.6, "test_fraction": 0.6}, "type data.val_fraction=0.15"),
        ({"classes": ["a", "b"], "num_classes": 3}, "data.classes names 2"),
    ],
)
def test_impossible_arguments_are_refused(tmp_path: Path, arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        module(tmp_path, **arguments)


def test_what_is_drawn_beside_given_splits_is_told(
    pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    monkeypatch.setattr(image_folder, "notice", told.append)
    shutil.copytree(pictures, tmp_path / "train")
    shutil.copytree(pictures / "red", tmp_path / "val" / "red")
    datamodule = loaded(tmp_path)
    assert any(f"{tmp_path} has no folder test: 9 pictures of train are kept for it" in line for line in told)
    assert "No picture for val of the classes blue, green" in told
    files = datamodule.sample_columns([8, 0])["file"]
    assert files == [paths(datamodule, "test")[place].rpartition(" ")[0] for place in (8, 0)]
    told.clear()
    loaded(pictures)
    assert told == [f"{pictures} holds pictures of 3 classes: 42 for train, 9 for val, 9 for test"]


def test_facts_refuse_what_no_run_could_use(pictures: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.val_fraction=0 leaves no picture .* type data.val_fraction=0.15"):
        module(pictures, val_fraction=0).facts()
    shutil.copytree(pictures, tmp_path / "own")
    (tmp_path / "own" / "yellow").mkdir()
    with pytest.raises(ValueError, match="yellow holds no picture"):
        module(tmp_path / "own").facts()
