"""Blocks of bytes: whole, in split order, the same for all ranks, from any file or folder."""

import multiprocessing
import os
import sysconfig
from itertools import chain, permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from project.data import TextDataModule
from project.data.text import ByteBlocks

SMALL: dict[str, Any] = {"context": 4, "batch_size": 2, "val_blocks": 2, "test_blocks": 3}


def numbered_file(folder: Path, size: int = 60) -> Path:
    """A file whose bytes are their own positions."""
    path = folder / "numbers.bin"
    path.write_bytes(bytes(range(size)))
    return path


def module(path: Path, **arguments: Any) -> TextDataModule:
    defaults = SMALL | {"path": str(path), "cache_dir": str(path.parent / "cache")}
    return TextDataModule(**defaults | arguments)


def loaded(path: Path, **arguments: Any) -> TextDataModule:
    datamodule = module(path, **arguments)
    datamodule.prepare_data()
    datamodule.setup()
    return datamodule


def blocks(datamodule: TextDataModule, split: str) -> list[list[int]]:
    dataset: ByteBlocks = getattr(datamodule, f"{split}_set")
    whole: list[list[int]] = dataset.__getitems__(torch.arange(len(dataset)))["tokens"].tolist()
    return whole


def content(datamodule: TextDataModule) -> bytes:
    """All bytes that are in a split."""
    text = b""
    for split in ("train", "val", "test"):
        for number, block in enumerate(blocks(datamodule, split)):
            text += bytes(block[1:] if number else block)
    return text


def folder_of_texts(folder: Path) -> Path:
    root = folder / "texts"
    files = {"a.py": "a" * 30, "b/c.py": "c" * 40, "b/d.md": "d" * 30, ".hidden.py": "h" * 9, ".git/x.py": "x" * 9}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_each_byte_is_predicted_once_and_in_one_split_only(tmp_path: Path) -> None:
    datamodule = loaded(numbered_file(tmp_path))
    splits = {split: blocks(datamodule, split) for split in ("train", "val", "test")}
    # 60 bytes: 3 * 4 + 1 for the test, 2 * 4 + 1 for validation, and 9 blocks in the 38 that remain.
    assert {split: len(found) for split, found in splits.items()} == {"train": 9, "val": 2, "test": 3}
    for found in splits.values():
        assert [block[0] for block in found[1:]] == [block[-1] for block in found[:-1]]
        predicted = list(chain.from_iterable(block[1:] for block in found))
        assert predicted == list(range(predicted[0], predicted[-1] + 1))
    seen = [set(chain.from_iterable(found)) for found in splits.values()]
    assert not seen[0] & seen[1]
    assert not seen[1] & seen[2]
    assert content(datamodule) == bytes(range(59))  # the last byte fills no block


def test_batch_is_what_the_model_expects(tmp_path: Path) -> None:
    datamodule = loaded(numbered_file(tmp_path))
    batch = next(iter(datamodule.train_dataloader()))
    assert batch["tokens"].shape == (2, 5)
    assert batch["tokens"].dtype == torch.int64
    assert torch.equal(datamodule.train_set[3]["tokens"], torch.arange(12, 17))  # type: ignore[index]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_order_is_by_seed_and_epoch_whatever_the_ranks(tmp_path: Path, num_workers: int) -> None:
    path = numbered_file(tmp_path)

    def epoch_batches(ranks: int, seed: int, epoch: int) -> list[list[int]]:
        shares = []
        for rank in range(ranks):
            datamodule = loaded(path, batch_size=4, seed=seed, num_workers=num_workers)
            strategy = SimpleNamespace(distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank})
            trainer = SimpleNamespace(strategy=strategy, training=False, accumulate_grad_batches=1)
            datamodule.trainer = trainer  # type: ignore[assignment]
            loader = datamodule.train_dataloader()
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            shares.append([batch["tokens"][:, 0].tolist() for batch in loader])
        return [list(chain(*parts)) for parts in zip(*shares, strict=True)]

    one = epoch_batches(1, seed=0, epoch=0)
    assert epoch_batches(2, seed=0, epoch=0) == one
    if num_workers == 0:
        others = [one, epoch_batches(4, seed=0, epoch=1), epoch_batches(1, seed=1, epoch=0)]
        assert all(others.count(order) == 1 for order in others)


def test_folder_is_read_whole_in_an_order_of_names_without_hidden_files(tmp_path: Path) -> None:
    root = folder_of_texts(tmp_path)
    text = content(loaded(root))
    files = (b"a" * 30, b"c" * 40, b"d" * 30)
    assert text in [b"".join(order)[:-1] for order in permutations(files)]  # the last byte fills no block
    assert set(content(loaded(root, suffixes=[".py"])).decode()) == set("ac")
    assert content(loaded(root)) == text


def test_folder_that_changed_is_read_anew(tmp_path: Path) -> None:
    root = folder_of_texts(tmp_path)
    loaded(root)
    (root / "a.py").write_text("z" * 30)
    os.utime(root / "a.py", ns=(1, 1))
    assert set(content(loaded(root)).decode()) == set("zcd")
    (root / "b" / "e.txt").write_text("e" * 30)
    assert set(content(loaded(root)).decode()) == set("zcde")


def test_folder_is_put_together_once(tmp_path: Path) -> None:
    root = folder_of_texts(tmp_path)
    loaded(root)
    (cached,) = (tmp_path / "cache").iterdir()
    before = cached.stat()
    loaded(root)
    assert [cached] == list((tmp_path / "cache").iterdir())
    assert cached.stat().st_ino == before.st_ino


@pytest.mark.parametrize("of_folder", [False, True])
def test_no_more_than_max_bytes_are_read(tmp_path: Path, of_folder: bool) -> None:
    path = folder_of_texts(tmp_path) if of_folder else numbered_file(tmp_path)
    assert len(content(loaded(path, max_bytes=50))) in range(46, 51)


def prepare(path: Path, start: Any) -> None:
    start.wait()
    module(path).prepare_data()


def test_ranks_that_prepare_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    root = folder_of_texts(tmp_path)
    (root / "large.txt").write_bytes(b"l" * 2**23)
    context = multiprocessing.get_context("fork")
    start = context.Barrier(3)
    ranks = [context.Process(target=prepare, args=(root, start)) for _ in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    (cached,) = (tmp_path / "cache").iterdir()
    assert cached.stat().st_size == 2**23 + 100


def test_setup_alone_will_do(tmp_path: Path) -> None:
    datamodule = module(folder_of_texts(tmp_path))
    datamodule.setup("fit")
    first = datamodule.train_set
    datamodule.setup("test")
    assert datamodule.train_set is first


def test_default_is_the_standard_library_without_its_tests(tmp_path: Path) -> None:
    datamodule = TextDataModule(cache_dir=str(tmp_path))
    datamodule.setup()
    (cached,) = tmp_path.iterdir()
    text = cached.read_bytes()
    assert 5e6 < len(text) < 5e7
    library = Path(sysconfig.get_path("stdlib"))
    assert (library / "argparse.py").read_bytes() in text
    assert (library / "asyncio" / "runners.py").read_bytes() in text
    assert Path(pytest.__file__).read_bytes() not in text
    assert len(datamodule.train_set or []) > 10_000


@pytest.mark.parametrize("variable", [True, False])
def test_cache_lies_where_the_system_says(tmp_path: Path, variable: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    if variable:
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    loaded(folder_of_texts(tmp_path), cache_dir=None)
    expected = tmp_path / ("elsewhere" if variable else ".cache") / "project"
    assert len(list(expected.iterdir())) == 1


def test_path_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.path=.*missing is neither a file nor a folder"):
        loaded(tmp_path / "missing")


def test_folder_without_fitting_files_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"holds no file that ends in .rst or .txt: type another"):
        loaded(folder_of_texts(tmp_path), suffixes=[".rst", ".txt"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="holds no file: type another"):
        loaded(tmp_path / "empty")


@pytest.mark.parametrize("size", [0, 1, 30])
def test_text_too_small_for_its_splits_and_a_batch_is_refused_with_what_it_needs(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match=f"gives {size} bytes, but one training batch .* need 31"):
        loaded(numbered_file(tmp_path, size))
    assert len(blocks(loaded(numbered_file(tmp_path, 31)), "train")) == 2


def test_cache_folder_that_can_not_be_made_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data.cache_dir=.* can't be made .*: type data.cache_dir="):
        loaded(folder_of_texts(tmp_path), cache_dir=str(numbered_file(tmp_path) / "cache"))


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        ({"vocab_size": 100}, "type data.vocab_size=256"),
        ({"context": 0}, "data.context=0 must be at least 1"),
        ({"val_blocks": 0}, "data.val_blocks=0 must be at least 1"),
        ({"max_bytes": 0}, "data.max_bytes=0 must be at least 1"),
        ({"batch_size": 0}, "data.batch_size=0"),
    ],
)
def test_impossible_arguments_are_refused(arguments: dict[str, Any], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        TextDataModule(**arguments)
