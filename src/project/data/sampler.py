"""Which samples a rank reads at each step.

Both samplers yield whole batches, as tensors of dataset indices, for `DataLoader(..., batch_size=None)`.
"""

import math
import random
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler

MOST_LEFT_OUT = 0.1  # of an epoch, before it is told


class _RankBatches(DistributedSampler[Tensor], SequentialSampler):  # type: ignore[misc]
    """A sampler that Lightning keeps, and tells the epoch.

    On several ranks Lightning replaces whatever is not a `DistributedSampler`, and under `overfit_batches`
    whatever is not a `SequentialSampler`.
    """

    def __init__(self, length: int, rank: int, num_replicas: int, seed: int = 0, shuffle: bool = False) -> None:
        super().__init__(range(length), num_replicas, rank, shuffle, seed)  # type: ignore[arg-type]
        self.length = length


class TrainBatches(_RankBatches):
    """The rank's shares of the global batches of one training epoch.

    The order depends on `seed` and `epoch` alone: step k trains on the same `global_batch_size` samples
    whatever the number of ranks. Samples that do not fill the last batch are dropped for the epoch, because
    the ranks' gradients are averaged with equal weights and a short batch would weigh its samples more. So are
    the last batches that do not fill a step of `batches_per_step` (gradient accumulation): Lightning divides
    the loss by the full number, and would weigh them less.

    Yields:
        Indices: (global_batch_size / num_replicas,) int64.

    Args:
        is_typed: Whether `data.batch_size` is a key to be typed; else it is that of a loader in the user's code.

    Raises:
        ValueError: The ranks can't share `global_batch_size` equally, or the set does not fill one batch.
    """

    def __init__(
        self,
        length: int,
        global_batch_size: int,
        rank: int,
        num_replicas: int,
        seed: int,
        shuffle: bool = True,
        batches_per_step: int = 1,
        is_typed: bool = True,
    ) -> None:
        given = f"{'data.' if is_typed else ''}batch_size={global_batch_size}"
        if global_batch_size % num_replicas:
            below = global_batch_size // num_replicas * num_replicas
            choices = [size for size in (below, below + num_replicas) if size > 0]
            raise ValueError(
                f"{given} is the global batch size and {num_replicas} ranks can't share it equally: "
                + _batch_sizes(is_typed, *choices)
            )
        if length == 0:
            raise ValueError("the train set is empty: check the path and the filters of your data")
        if length < global_batch_size * batches_per_step:
            remedy = _smaller(length, global_batch_size, num_replicas, batches_per_step, is_typed)
            per_step = f"{batches_per_step} batches of " if batches_per_step > 1 else ""
            raise ValueError(f"the train set holds {_samples(length)}, fewer than {per_step}{given}: {remedy}")
        super().__init__(length, rank, num_replicas, seed, shuffle)
        self.global_batch_size = global_batch_size
        self.batches_per_step = batches_per_step
        self.is_typed = is_typed
        # Where the next iteration starts; above 0 if a run resumes inside an epoch. With a full epoch's batches and
        # more a further round begins, of a loader that Lightning goes through several times beside a longer one.
        self.first_batch = 0

    @property
    def order_key(self) -> str:
        """What the order of the samples is drawn from."""
        rounds = self.first_batch // len(self)
        return f"{self.seed}/{self.epoch}" + (f"+{rounds}" if rounds else "")

    @property
    def left_out(self) -> int:
        """Samples of each epoch that fill no step."""
        return self.length % (self.global_batch_size * self.batches_per_step)

    def told_of_left_out(self) -> str | None:
        """A sentence where each epoch leaves out many samples, and fewer are possible; else None."""
        size, per_step, ranks = self.global_batch_size, self.batches_per_step, self.num_replicas
        fewer_batches = ((size, number) for number in range(per_step - 1, 0, -1))
        smaller_batches = ((number, per_step) for number in range(size - ranks, 0, -ranks))
        most = MOST_LEFT_OUT * self.length
        better = (pair for pair in chain(fewer_batches, smaller_batches) if self.length % (pair[0] * pair[1]) <= most)
        found = next(better, None) if self.left_out > most else None
        if found is None:
            return None
        of = f"a step of {per_step} batches" if per_step > 1 else f"a batch of {size}"
        changed = f"type trainer.accumulate_grad_batches={found[1]}"
        return (
            f"Each epoch leaves out {self.left_out} of {_samples(self.length)}, which do not fill {of}: "
            f"{changed if found[1] != per_step else _batch_sizes(self.is_typed, found[0])} for "
            f"{self.length % (found[0] * found[1])}"
        )

    def __len__(self) -> int:
        steps = self.length // (self.global_batch_size * self.batches_per_step)
        return steps * self.batches_per_step

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        order = self._order()
        share = self.global_batch_size // self.num_replicas
        for batch in range(self.first_batch % len(self), len(self)):
            start = batch * self.global_batch_size + self.rank * share
            yield order[start : start + share]

    def state_dict(self) -> dict[str, Any]:
        """What the order of the samples within an epoch depends on, and which epoch it is."""
        names = ("epoch", "length", "global_batch_size", "seed", "shuffle")
        return {name: getattr(self, name) for name in names}

    def check(self, state_dict: dict[str, Any]) -> None:
        """Check that the epoch under way can go on with this sampler; the number of ranks may differ.

        Raises:
            ValueError: Its batches would not be those that the interrupted run had not read yet.
        """
        own = self.state_dict()
        for name, key in (("global_batch_size", "data.batch_size"), ("seed", "seed"), ("shuffle", "data.shuffle")):
            if state_dict.get(name, own[name]) != own[name]:
                is_typed = self.is_typed or key == "seed"
                remedy = f"type {key}={state_dict[name]}" if is_typed else "give the loader what it had"
                raise ValueError(
                    f"{key if is_typed else key.removeprefix('data.')}={own[name]} differs from the run's "
                    f"{state_dict[name]}, and an epoch that is under way can't change its batches: {remedy}"
                )
        if state_dict.get("length", self.length) != self.length:
            raise ValueError(
                f"the train set holds {self.length} samples, it held {state_dict['length']} when the run was "
                "interrupted, and an epoch that is under way can't change its batches: give it the same samples"
            )

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        # Hashed, because seed + epoch would give seed 0 in epoch 1 the order of seed 1 in epoch 0.
        mixed = random.Random(self.order_key).getrandbits(32)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(mixed))


class EvaluationBatches(_RankBatches):
    """The rank's shares of batches that together hold every sample of a dataset exactly once, in its order.

    A step reads the same samples whatever the number of ranks, so that `trainer.limit_val_batches` means the same
    everywhere. Every rank takes part in every step: forward passes may communicate (sharded weights, batch norm
    buffers), and a rank with one batch more would wait for the others forever. Batches therefore differ by one
    sample at most, instead of leaving the remainder to the last; where the set is so small that a step would not
    reach every rank, there are fewer and larger batches.

    Attributes:
        steps: Number of batches.

    Yields:
        Indices: (B,) int64, ascending.

    Args:
        name: Of the set, for errors.

    Raises:
        ValueError: There are fewer samples than ranks.
    """

    def __init__(
        self, length: int, global_batch_size: int, rank: int, num_replicas: int, name: str = "the set"
    ) -> None:
        if length == 0:
            raise ValueError(f"{name} is empty: check the path and the filters of your data")
        if length < num_replicas:
            raise ValueError(
                f"{name}: {_samples(length)} can't be spread over {num_replicas} ranks: "
                f"type trainer.devices={length} or fewer"
            )
        super().__init__(length, rank, num_replicas)
        self.steps = min(math.ceil(length / global_batch_size), length // num_replicas)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        for step in range(self.steps):
            yield self.share(step)

    def share(self, step: int) -> Tensor:
        """Indices (B,) that the rank reads in a step."""
        start, stop = _near_equal_part(self.length, self.steps, step)
        first, last = _near_equal_part(stop - start, self.num_replicas, self.rank)
        return torch.arange(start + first, start + last)


def _samples(number: int) -> str:
    return f"{number} sample{'s' if number != 1 else ''}"


def _batch_sizes(is_typed: bool, *choices: int) -> str:
    if is_typed:
        return f"type {' or '.join(f'data.batch_size={size}' for size in choices)}"
    return f"give the loader a batch_size of {' or '.join(map(str, choices))}"


def _smaller(length: int, batch_size: int, ranks: int, batches_per_step: int, is_typed: bool) -> str:
    """What to type where a set does not fill one step."""
    if batches_per_step > 1 and length >= batch_size:
        return f"type trainer.accumulate_grad_batches={length // batch_size} or less"
    largest = length // batches_per_step // ranks * ranks
    if largest:
        return f"{_batch_sizes(is_typed, largest)} or less"
    if length < ranks:
        return f"type trainer.devices={length} or fewer"
    alone = _batch_sizes(is_typed, length // ranks * ranks)
    return f"type trainer.accumulate_grad_batches=1, and {alone.removeprefix('type ')} or less"


def _near_equal_part(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` consecutive parts of `length`; the earlier ones take the remainder."""
    size, remainder = divmod(length, parts)
    start = index * size + min(index, remainder)
    return start, start + size + (index < remainder)
