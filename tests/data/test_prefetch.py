"""Copies to the device ahead of need."""

from typing import Any

import pytest
import torch

from project.data.prefetch import CudaCopies, ahead


class Noted:
    """Copies that note what is done to them."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def start(self, batch: Any) -> Any:
        self.events.append(f"start {batch}")
        return batch

    def finish(self, copy: Any) -> Any:
        self.events.append(f"finish {copy}")
        return copy


@pytest.mark.parametrize("number", [0, 1, 2, 5])
def test_batches_come_in_their_order_and_each_once(number: int) -> None:
    assert list(ahead(range(number), Noted())) == list(range(number))


def test_a_copy_starts_before_the_batch_before_it_is_computed_on_and_no_earlier() -> None:
    copies = Noted()
    for batch in ahead("abc", copies):
        copies.events.append(f"compute {batch}")
    assert copies.events == [
        "start a",
        "start b",
        "finish a",
        "compute a",
        "start c",
        "finish b",
        "compute b",
        "finish c",
        "compute c",
    ]


def test_an_error_of_the_loader_comes_through() -> None:
    def batches() -> Any:
        yield 1
        raise OSError("the disk")

    with pytest.raises(OSError, match="the disk"):
        list(ahead(batches(), Noted()))


@pytest.mark.gpu
def test_batches_on_a_gpu_are_those_of_the_host() -> None:
    device = torch.device("cuda", 0)
    batches = [{"x": torch.full((2**20,), float(number)).pin_memory(), "name": str(number)} for number in range(8)]
    for number, batch in enumerate(ahead(batches, CudaCopies(device))):
        assert batch["x"].device == device
        assert batch["name"] == str(number)
        product = batch["x"] * 2  # on the computing stream
        assert bool((product == 2 * number).all())
