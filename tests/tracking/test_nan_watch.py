"""A loss that is no number ends the training where it was, or not at all."""

import time
import warnings
from pathlib import Path

import pytest
import torch

from project.errors import UserError
from project.launch import agent
from project.launch.run import Run
from project.tracking import nan_watch
from project.tracking.nan_watch import MOST_SKIPPED, READ_EVERY, FirstBad, NanWatch
from tracking.nan_ranks import BATCHES, Spoilt, fit


def test_stop_names_step_and_rank() -> None:
    with pytest.raises(UserError, match="^rank 0: the loss of batch 4 is not finite: type "):
        fit(Spoilt(4), NanWatch())


def test_gradients_show_in_the_next_loss_and_their_weight_is_named() -> None:
    with pytest.raises(UserError, match="batch 5 is not finite, and so is the weight net.1.weight, through the grad"):
        fit(Spoilt(4, "gradient"), NanWatch())


def test_ignore_warns_once_and_goes_on() -> None:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        trainer = fit(Spoilt(4), NanWatch("ignore"))
    (warning,) = [str(each.message) for each in told if "not finite" in str(each.message)]
    assert warning.startswith("rank 0: the loss of batch 4 is not finite")
    assert trainer.global_step == BATCHES


@pytest.mark.parametrize("what", ["loss", "gradient"])
def test_skip_leaves_the_step_out_as_if_it_had_not_been(what: str) -> None:
    def weights(spoilt: int | None, batches: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        module = Spoilt(spoilt, what)
        watch = NanWatch("skip")
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            fit(module, watch, limit_train_batches=batches)
        assert watch.skipped == (spoilt is not None)
        assert any("batch 4: the gradients are not finite, first that of net." in str(w.message) for w in told) == (
            spoilt is not None
        )
        return [parameter.detach() for parameter in module.parameters()]

    # All batches are alike, so that it is as if there had been one less.
    for skipped, without in zip(weights(4, BATCHES), weights(None, BATCHES - 1), strict=True):
        assert torch.equal(skipped, without)


def test_skip_gives_up_where_all_steps_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nan_watch, "MOST_SKIPPED", 5)
    assert MOST_SKIPPED > 5
    with pytest.raises(UserError, match="the last 5 steps until batch 7 were left out"):
        fit(Spoilt(3, "loss", last=BATCHES), NanWatch("skip"))


@pytest.mark.parametrize("on_nan", nan_watch.CHOICES)
def test_a_sound_training_is_left_alone(on_nan: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*finite.*|.*left out.*")
        assert fit(Spoilt(None), NanWatch(on_nan)).global_step == BATCHES


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="on_nan=explode is unknown: type callbacks.nan.on_nan=stop, skip or ignore"):
        NanWatch("explode")


def test_a_scaler_may_let_losses_overflow() -> None:
    first = FirstBad(torch.device("cpu"), only_nan=True)
    first.note(1, torch.tensor(float("inf")))
    assert first.read() is None
    first.note(2, torch.tensor(float("nan")))
    assert first.read() == 2


def test_a_loss_of_several_elements_is_looked_at_whole() -> None:
    """As manual optimization may go backward from."""
    first = FirstBad(torch.device("cpu"))
    first.note(1, torch.tensor([1.0, 2.0]))
    assert first.read() is None
    first.note(2, torch.tensor([1.0, float("inf")]))
    assert first.read() == 2


class Event:
    passed = False

    def record(self) -> None: ...

    def query(self) -> bool:
        return self.passed


def test_the_first_is_read_when_the_device_has_passed_and_never_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, with a CPU in its place."""
    event = Event()
    monkeypatch.setattr(nan_watch, "cuda_event", lambda: event)
    first = FirstBad(torch.device("cpu"))
    first._on_cpu, first._on_cuda = False, True
    for step in range(1, READ_EVERY + 1):
        first.note(step, torch.tensor(float("nan") if step in (3, 5) else 1.0))
        assert first.read() is None
    assert first.read() is None  # still under way
    event.passed = True
    assert first.read() == 3
    assert first.read(wait=True) == 3


def test_other_accelerators_are_waited_for_once_in_some_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on MPS, with a CPU in its place."""
    first = FirstBad(torch.device("cpu"))
    first._on_cpu = False
    reads: list[int] = []
    number = FirstBad._number
    monkeypatch.setattr(FirstBad, "_number", lambda _, tensor: reads.append(step) or number(tensor))
    monkeypatch.setattr(torch.Tensor, "item", lambda _: pytest.fail("waits for the device"))
    told = []
    for step in range(1, 2 * READ_EVERY + 1):
        first.note(step, torch.tensor(float("nan") if step in (READ_EVERY + 3, READ_EVERY + 5) else 1.0))
        told.append(first.read())
    assert reads == [READ_EVERY, 2 * READ_EVERY]
    assert told == [None] * (2 * READ_EVERY - 1) + [READ_EVERY + 3]


@pytest.mark.gpu
def test_cuda_tells_it_some_steps_later() -> None:
    first = FirstBad(torch.device("cuda"))
    told = []
    for step in range(1, 5 * READ_EVERY):
        first.note(step, torch.tensor(float("nan") if step == 3 else 1.0, device="cuda"))
        told.append(first.read())
        time.sleep(0.001)
    assert told[:3] == [None] * 3
    assert 3 in told


@pytest.mark.slow
def test_the_rank_whose_loss_it_was_is_named(tmp_path: Path) -> None:
    config = {
        "launch": {"threads_per_rank": 1, "timeout_s": 60}, "trainer": {"accelerator": "cpu", "devices": 2}, "rank": 1,
    }  # fmt: skip
    with pytest.raises(UserError, match="^rank 1: the loss of batch 4 is not finite"):
        agent.run_ranks("tracking.nan_ranks:train", config, Run(tmp_path, [], {}, started_at=time.time()), 2)
