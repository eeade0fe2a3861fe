"""Which errors are told in a sentence, and the nearest right name."""

import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.nn.parallel import DistributedDataParallel

from project.data.datamodule import DataModule, TensorDataset
from project.data.loaders import SampleError
from project.errors import UserError, did_you_mean, full_tracebacks, nearest, sentence
from project.launch import devices


def raise_it(error: Exception) -> None:
    raise error


def call_a_library_that_refuses() -> None:
    np.zeros(2).reshape(3)


def caught(function: object, *args: object) -> Exception:
    with pytest.raises(Exception) as info:
        function(*args)  # type: ignore[operator]
    return info.value


@pytest.mark.parametrize("error", [UserError("type a=1"), MisconfigurationException("type a=1")])
def test_errors_made_for_the_user_are_their_own_sentence(error: Exception) -> None:
    assert sentence(caught(raise_it, error)) == "type a=1"


def test_a_value_error_that_the_packages_code_raises_is_a_sentence() -> None:
    error = caught(lambda: DataModule(batch_size=0))
    assert isinstance(error, ValueError)
    assert sentence(error) == "data.batch_size=0 must be at least 1: type data.batch_size=64"


def test_a_value_error_of_a_class_of_the_package_is_a_sentence_whoever_raised_it() -> None:
    told = caught(raise_it, SampleError("x.png can't be read: mend it"))
    assert sentence(told) == "x.png can't be read: mend it"


@pytest.mark.parametrize(
    "error",
    [
        caught(raise_it, ValueError("by a test, which is not the package")),
        caught(call_a_library_that_refuses),
        caught(lambda: TensorDataset({"x": None})),  # type: ignore[dict-item]
        ValueError("never raised"),
        RuntimeError("any other"),
        KeyError("any other"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_any_other_error_keeps_its_traceback(error: Exception) -> None:
    assert sentence(error) is None


def test_a_value_error_of_a_builtin_that_the_packages_code_calls_is_no_sentence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "many")
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    error = caught(devices.started_by)  # int("many"), written in the package but raised by Python
    assert isinstance(error, ValueError)
    assert sentence(error) is None


@pytest.mark.parametrize(
    ("name", "expected"),
    [("adamv", "adamw"), ("sgd", "sgd"), ("SGD", None), ("momentum", None), ("", None)],
)
def test_the_nearest_name_is_the_most_alike_or_none(name: str, expected: str | None) -> None:
    assert nearest(name, ["adamw", "sgd"]) == expected


@pytest.mark.parametrize("names", [["val/acc", "val/auroc"], ["val/auroc", "val/acc"]])
def test_a_shared_beginning_counts_more_than_other_letters(names: list[str]) -> None:
    assert nearest("val/accuracy", names) == "val/acc"
    assert nearest("val/f1_macro", ["val/f1", "val/f1_micro"]) == "val/f1_micro"


def test_a_hint_is_given_only_where_a_name_comes_near() -> None:
    assert did_you_mean("adamv", ["adamw"]) == ": did you mean adamw?"
    assert did_you_mean("rmsprop", ["adamw"]) == ""


@pytest.mark.parametrize(("value", "expected"), [("1", True), ("0", False), (None, False)])
def test_tracebacks_are_full_when_hydras_variable_says_so(
    value: str | None, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    if value is not None:
        monkeypatch.setenv("HYDRA_FULL_ERROR", value)
    assert full_tracebacks() is expected


def test_what_torch_says_at_length_is_told_with_what_to_type() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    weight.sum().backward()  # type: ignore[no-untyped-call]
    told = sentence(caught(torch.optim.SparseAdam([weight]).step))
    assert told is not None
    assert told.endswith("type optimizer=adamw")


def test_an_operation_that_spread_weights_do_not_have_names_the_strategy() -> None:
    told = sentence(RuntimeError("Sharding propagation failed for aten.pow_.Scalar(Spec(f64[1, 64](_NormP(2))), 2)"))
    assert told is not None
    assert told.endswith("type optimizer=adamw, or trainer/strategy=ddp")


def test_weights_that_a_lazy_module_lacks_are_told_with_what_to_write() -> None:
    lazy = torch.nn.LazyLinear(2)
    for error in (
        caught(lazy._replicate_for_data_parallel),  # as dp does; DDP's error begins alike
        caught(lambda: lazy.weight.detach()),  # as FSDP does
    ):
        told = sentence(error)
        assert told is not None
        assert "nn.Linear(in_features, out_features)" in told


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(24, "Too many open files"), "type ulimit -n 4096"),
        (RuntimeError("[enforce fail at loop.cc:48] rv != -1. pipe: Too many open files"), "type ulimit -n 4096"),
        (RuntimeError("received 0 items of ancdata"), "type ulimit -n 4096"),
        (
            RuntimeError("[enforce fail at device.cc:84] ifa != nullptr. Unable to find address for: nope0"),
            "^GLOO_SOCKET_IFNAME=nope0 names no network interface",
        ),
        (
            ValueError(
                " `val_check_interval` (1000) must be less than or equal to the number of the training batches (8). If"
            ),
            "^trainer.val_check_interval=1000 is more than the 8 batches .*: type trainer.val_check_interval=8 or",
        ),
    ],
)
def test_limits_of_the_host_and_of_lightning_are_told_with_what_to_type(error: Exception, words: str) -> None:
    assert re.search(words, str(sentence(error)))


def test_gradients_that_are_sparse_are_told_where_they_are_clipped() -> None:
    error: Exception = NotImplementedError(
        "Could not run 'aten::linalg_vector_norm' with arguments from the 'SparseCPU' backend."  # up to torch 2.13
    )
    net = torch.nn.Embedding(4, 2, sparse=True)
    net(torch.tensor([1])).sum().backward()
    try:
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    except NotImplementedError as raised:
        error = raised
    assert "torch has no aten::linalg_vector_norm: leave out sparse=True" in str(sentence(error))


def test_a_loss_without_a_weight_is_told() -> None:
    told = sentence(caught(torch.ones(1).backward))
    assert str(told).startswith("the loss of training_step depends on no weight that is trained")
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert told == sentence(caught(DistributedDataParallel, torch.nn.Identity()))
    finally:
        dist.destroy_process_group()


def test_a_share_of_less_than_a_batch_is_told_with_what_to_type() -> None:
    text = (
        "You requested to check 0.001 of the `val_dataloader` but 0.001 * 4 < 1. Please increase the "
        "`limit_val_batches` argument. Try at least `limit_val_batches=0.25`"
    )
    told = str(sentence(MisconfigurationException(text)))
    assert told.startswith("0.001 of 4 batches is less than one: type trainer.limit_val_batches=0.25 or more; or")
    assert told.endswith("trainer.overfit_batches=1")


def test_another_error_of_files_keeps_its_traceback() -> None:
    assert sentence(OSError(5, "Input/output error")) is None
