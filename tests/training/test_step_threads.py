"""Threads for small steps."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from project.training.step_threads import FLOP_A_THREAD, StepThreads, of_step
from small_classifier import VALIDATION, Classifier, loader

STEPS = [16] * 4


class Threads(L.Callback):
    """Notes how many threads a step has."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(torch.get_num_threads())


@pytest.fixture(autouse=True)
def two_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def wide(width: int = 4096) -> nn.Module:
    """16 samples are 3 times 2 times 6 and 3 times the width, and the width squared, times 16: some GFLOP."""
    return nn.Sequential(nn.Linear(6, width), nn.ReLU(), nn.Linear(width, width // 4), nn.Linear(width // 4, 3))


class Remembers(nn.Module):
    """Its weights are those of an LSTM, about whose products nothing is known here."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.LSTM(6, 64, batch_first=True)
        self.head = nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cells(x[:, None])[0][:, -1])


def fit(folder: Path, callback: StepThreads, net: nn.Module | None = None, **options: Any) -> list[int]:
    threads = Threads()
    trainer = L.Trainer(
        accelerator="cpu", max_epochs=1, default_root_dir=folder, callbacks=[callback, threads], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        **{"num_sanity_val_steps": 1} | options,
    )  # fmt: skip
    model = Classifier(net).float()
    trainer.fit(model, loader(STEPS, dtype=torch.float32), loader(VALIDATION, dtype=torch.float32))
    return threads.seen


@pytest.mark.parametrize(("flop", "threads"), [(0, 1), (1.4, 1), (1.6, 2), (4, 4), (100, 8)])
def test_each_thread_has_enough_to_do(flop: float, threads: int) -> None:
    assert of_step(flop * FLOP_A_THREAD, most=8) == threads


def test_small_steps_have_one_thread_and_the_process_gets_its_own_back(tmp_path: Path) -> None:
    assert fit(tmp_path, StepThreads("auto")) == [1, 1, 1, 1]
    assert torch.get_num_threads() == 2


@pytest.mark.parametrize("net", [wide, Remembers])
def test_large_steps_and_unknown_ones_keep_all_threads(tmp_path: Path, net: Any) -> None:
    assert fit(tmp_path, StepThreads("auto"), net()) == [2, 2, 2, 2]


def test_a_number_that_was_typed_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fit(tmp_path, StepThreads(2)) == [2, 2, 2, 2]
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert fit(tmp_path, StepThreads("auto")) == [2, 2, 2, 2]


@pytest.mark.parametrize("in_place", [True, False])
def test_a_compiled_model_is_not_counted(tmp_path: Path, in_place: bool) -> None:
    net: Any = wide(8)
    if in_place:
        net.compile(backend="eager")
    else:
        net = torch.compile(net, backend="eager")
    assert fit(tmp_path, StepThreads("auto"), net) == [2, 2, 2, 2]


@pytest.mark.filterwarnings("error:Using `torch.compile")  # torch's, of hooks on all modules
def test_a_net_that_is_compiled_aside_stays_in_one_piece_and_is_not_counted(tmp_path: Path) -> None:
    graphs: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append([node.target.__name__ for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = wide(8)
            self.compiled = [torch.compile(self.net, backend=backend)]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            output: torch.Tensor = self.compiled[0](x)
            return output

    callback = StepThreads("auto")
    assert fit(tmp_path, callback, Aside()) == [2, 2, 2, 2]
    assert callback.state_dict() == {"flop": None}
    assert {tuple(names) for names in graphs} == {("linear", "relu", "linear", "linear")}


def test_a_run_that_goes_on_with_a_validation_has_its_threads_already() -> None:
    callback = StepThreads("auto")
    callback.load_state_dict({"flop": 1.0})
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")))
    callback.on_train_start(trainer, Classifier())
    assert torch.get_num_threads() == 1
    callback.on_train_end()
    assert torch.get_num_threads() == 2


def test_ranks_agree_on_one_number(tmp_path: Path) -> None:
    """Their samples may differ in size, and a checkpoint holds the number of one."""
    callback = StepThreads("auto")
    of_rank_0 = SimpleNamespace(root_device=torch.device("cpu"), broadcast=lambda own: FLOP_A_THREAD * 2)
    trainer: Any = SimpleNamespace(strategy=of_rank_0, world_size=2)
    callback.on_train_batch_start(trainer, Classifier(), torch.zeros(4))
    assert callback.state_dict() == {"flop": FLOP_A_THREAD * 2}
    callback.on_train_end()


def test_a_run_that_goes_on_has_the_threads_that_it_began_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = StepThreads("auto")
    fit(tmp_path, first, wide(64))
    second = StepThreads("auto")
    second.load_state_dict(first.state_dict())
    validated = Threads()
    monkeypatch.setattr(Classifier, "on_validation_start", lambda self: validated.on_train_batch_end(), raising=False)
    # No sanity check counts anything, as in a run that goes on.
    assert fit(tmp_path, second, wide(64), num_sanity_val_steps=0) == [1, 1, 1, 1]
    assert validated.seen == [1]
    assert fit(tmp_path, StepThreads("auto"), wide(64), num_sanity_val_steps=0) == [2, 2, 2, 2]


def test_what_a_step_computes_is_counted(tmp_path: Path) -> None:
    callback = StepThreads("auto")
    fit(tmp_path, callback)
    products = 6 * 16 + 16 * 16 + 16 * 3  # of the net's three linear layers, a sample
    assert callback.state_dict()["flop"] == pytest.approx(16 * 3 * 2 * products)
