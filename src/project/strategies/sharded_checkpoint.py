"""Checkpoints of spread models: a folder that each rank writes its shards to, made one plain file at the end.

The folder holds tensors in torch's distributed format, and in ``meta.pt`` everything else as plain data.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from project.errors import UserError
from project.strategies.checkpoint_files import CHECKSUMS, PART, checksum, is_of_disk, put, remove

META = "meta.pt"  # Lightning's name for it
# Of a checkpoint: the model's weights, and those that training goes on with where these are an average of them.
TRAINING_WEIGHTS = "training_state_dict"
WEIGHTS = ("state_dict", TRAINING_WEIGHTS)
Checkpoint = dict[str, Any]
Shards = tuple[dict[str, Tensor], Checkpoint]  # the tensors of model and optimizers by flat keys, and the rest


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint is a folder of shards."""
    return (path / META).is_file()


def save_sharded(shards: Shards, path: Path, place: int = 0, keep: int = 1, *, group: dist.ProcessGroup) -> None:
    """Write a folder of shards; all ranks call this. What stood at ``path`` stays until the new one is whole.

    ``place`` and ``keep`` are those of ``checkpoint_files.put``. ``group`` has all ranks and is of the CPU; in a thread
    beside the training it must be a group that the training does not use.

    Raises:
        OSError: a rank could not write, for a full disk and its like; on all ranks.
    """
    tensors, rest = shards
    rank = dist.get_rank(group)
    beside = path.with_name(path.name + PART)
    try:
        _on_all_ranks(lambda: _make_folder(beside) if rank == 0 else None, group)
        _save(tensors, beside, group)
        sums = _on_all_ranks(lambda: {file.name: checksum(file) for file in beside.glob(f"__{rank}_*")}, group)
        _on_all_ranks(lambda: _finish(rest, beside, sums, path, place, keep) if rank == 0 else None, group)
    except OSError:
        if rank == 0:
            remove(beside)
        raise


def _save(tensors: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    # No copying ahead: it asks for a CUDA stream, and a thread of its own would open one on the first GPU.
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)
    try:
        save(tensors, storage_writer=writer, process_group=group)
    except CheckpointException as failed:  # raised on all ranks alike
        raise OSError(str(next(iter(failed.failures.values()))[0])) from failed


def _make_folder(path: Path) -> None:
    remove(path)
    path.mkdir(parents=True)


def _finish(rest: Checkpoint, beside: Path, sums: list[dict[str, int]], path: Path, place: int, keep: int) -> None:
    torch.save(rest, beside / META)
    whole = {name: value for of_rank in sums for name, value in of_rank.items()}
    whole |= {name: checksum(beside / name) for name in (META, ".metadata")}
    (beside / CHECKSUMS).write_text(json.dumps(whole))
    put(beside, path, place, keep)


def _on_all_ranks(action: Callable[[], Any], group: dist.ProcessGroup) -> list[Any]:
    """What an action returns on each rank. An error on one is raised on all, so that none waits for it in vain."""
    error: Exception | None = None
    try:
        own = action()
    except Exception as raised:
        error = raised
        own = OSError(str(raised)) if is_of_disk(raised) else RuntimeError(repr(raised))
    told: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, own, group=group)
    if error := error or next((one for one in told if isinstance(one, Exception)), None):
        raise error
    return told


def load_sharded(path: Path, like: Mapping[str, Any], weights_only: bool | None = None) -> Checkpoint:
    """Read a folder of shards, in one process or on all ranks, whatever number of ranks wrote it.

    ``like`` says how to spread what is read: DTensors by key (``state_dict.net.weight``, ``optimizer_0.3`` for all
    state of the parameter 3). What it does not name becomes a plain tensor.
    """
    reader = FileSystemReader(path)
    tensors: dict[str, Tensor] = {}
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(stored, TensorStorageMetadata)
        model = like.get(key, like.get(key.rpartition(".")[0]))
        dtype = stored.properties.dtype
        if isinstance(model, DTensor) and model.shape == stored.size and not _is_step(key):
            tensors[key] = torch.empty_like(model, dtype=dtype, requires_grad=False)
        else:
            tensors[key] = torch.empty(stored.size, dtype=dtype)
    alone = not any(isinstance(tensor, DTensor) for tensor in tensors.values())
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as we asked for
        load(tensors, storage_reader=FileSystemReader(path), no_dist=alone)
    checkpoint: Checkpoint = torch.load(path / META, map_location="cpu", weights_only=weights_only)
    return _put_together(tensors, checkpoint)


def consolidate(path: Path) -> None:
    """Make one plain file, as every other strategy writes, of a folder of shards, in its place.

    For one process. The tensors of model and optimizers, whole, must fit into its memory. Does nothing where
    ``path`` is a file already.
    """
    if not is_sharded(path):
        return
    checkpoint = load_sharded(path, like={}, weights_only=True)
    beside = path.with_name(path.name + PART)
    remove(beside)
    torch.save(checkpoint, beside)
    put(beside, path)


def consolidate_all(trainer: L.Trainer) -> None:
    """Consolidate what the run's checkpoint callbacks have saved; all ranks call this, rank 0 does it."""
    if trainer.is_global_zero:
        for callback in trainer.checkpoint_callbacks:
            path = getattr(callback, "best_model_path", "")
            for saved in sorted(Path(path).parent.glob("*.ckpt")) if path else ():
                consolidate(saved)
    trainer.strategy.barrier("checkpoints consolidated")


def gathered(tree: Any, rank: int) -> Any:
    """The tensors of nested dicts and lists, whole, in rank 0's memory; None on other ranks, which must call it too."""

    def whole(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            full = leaf.detach()
            full = full.full_tensor() if isinstance(full, DTensor) else full
            return full.cpu() if rank == 0 else None
        return leaf

    result = tree_map(whole, tree)
    return result if rank == 0 else None


def spread_like(value: Any, model: Any) -> Any:
    """A whole tensor that every rank holds, spread as ``model`` is; anything else, or another shape, as it is."""
    if not isinstance(value, Tensor) or isinstance(value, DTensor) or not isinstance(model, DTensor):
        return value
    if value.shape != model.shape:
        return value  # load_state_dict tells
    mesh = model.device_mesh
    on_device = value.to(model.to_local().device)
    whole = DTensor.from_local(on_device, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return whole.redistribute(mesh, model.placements)


def spread_optimizer_state(state: Checkpoint, optimizer: torch.optim.Optimizer) -> Checkpoint:
    """An optimizer's plain state, spread as its parameters are."""
    parameters = parameters_by_index(state, optimizer)
    spread = {
        index: {
            name: value if _is_step(name) else spread_like(value, parameters.get(index))
            for name, value in values.items()
        }
        for index, values in state["state"].items()
    }
    return state | {"state": spread}


def parameters_by_index(state: Checkpoint, optimizer: torch.optim.Optimizer) -> dict[int, Tensor]:
    """The optimizer's parameters by the numbers that its saved state gives them."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return dict(zip(indices, parameters, strict=False))  # Optimizer.load_state_dict tells a difference in length


def _is_step(key: str) -> bool:
    """Optimizers count in a scalar tensor, which is not spread even where the parameter is a scalar too."""
    return key.rpartition(".")[2] == "step"


def take_apart(checkpoint: Checkpoint) -> Shards:
    """What ``save_sharded`` writes.

    Raises:
        UserError: an optimizer nests its state, which can't be taken apart.
    """
    tensors: dict[str, Tensor] = {}

    def without_tensors(values: Mapping[Any, Any], prefix: str) -> Checkpoint:
        tensors.update({f"{prefix}.{name}": value for name, value in values.items() if isinstance(value, Tensor)})
        return {name: value for name, value in values.items() if not isinstance(value, Tensor)}

    rest = dict(checkpoint)
    rest |= {key: without_tensors(checkpoint[key], key) for key in WEIGHTS if key in checkpoint}
    if "optimizer_states" in checkpoint:
        rest["optimizer_states"] = [
            state
            | {
                "state": {
                    index: without_tensors(values, f"optimizer_{number}.{index}")
                    for index, values in state["state"].items()
                }
            }
            for number, state in enumerate(checkpoint["optimizer_states"])
        ]
    if any(isinstance(leaf, DTensor) for leaf in tree_leaves(rest)):
        raise UserError(
            "the optimizer, or a callback, nests tensors that are spread over ranks, which shards can't store: type "
            "trainer.strategy.save=single"
        )
    return tensors, rest


def _put_together(tensors: dict[str, Tensor], rest: Checkpoint) -> Checkpoint:
    for key, tensor in tensors.items():
        owner, _, name = key.partition(".")
        if owner in WEIGHTS:
            rest[owner][name] = tensor
        else:
            index, _, name = name.partition(".")
            rest["optimizer_states"][int(owner.removeprefix("optimizer_"))]["state"][int(index)][name] = tensor
    return rest
