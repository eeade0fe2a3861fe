"""Which samples a rank reads at each step.

Both samplers yield whole batches, as tensors of dataset indices, for `DataLoader(..., batch_size=None)`.
"""

import math
import random
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils.data import DistributedSampler, SequentialSampler


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
    the ranks' gradients are averaged with equal weights and a short batch would weigh its samples more.

    Yields:
        Indices: (global_batch_size / num_replicas,) int64.

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
        epoch: int = 0,
    ) -> None:
        if global_batch_size % num_replicas:
            below = global_batch_size // num_replicas * num_replicas
            choices = [size for size in (below, below + num_replicas) if size > 0]
            raise ValueError(
                f"data.batch_size={global_batch_size} is the global batch size and {num_replicas} ranks "
                f"can't share it equally: type {' or '.join(f'data.batch_size={size}' for size in choices)}"
            )
        if length < global_batch_size:
            largest = length // num_replicas * num_replicas
            remedy = f"data.batch_size={largest} or less" if largest else f"trainer.devices={max(length, 1)} or fewer"
            raise ValueError(
                f"the train set holds {length} samples, fewer than data.batch_size={global_batch_size}: type {remedy}"
            )
        super().__init__(length, rank, num_replicas, seed, shuffle)
        self.global_batch_size = global_batch_size
        self.epoch = epoch
        self.first_batch = 0  # where the next iteration starts; above 0 if a run resumes inside an epoch

    def __len__(self) -> int:
        return self.length // self.global_batch_size

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        order = self._order()
        share = self.global_batch_size // self.num_replicas
        for batch in range(self.first_batch, len(self)):
            start = batch * self.global_batch_size + self.rank * share
            yield order[start : start + share]

    def _order(self) -> Tensor:
        if not self.shuffle:
            return torch.arange(self.length)
        # Hashed, because seed + epoch would give seed 0 in epoch 1 the order of seed 1 in epoch 0.
        mixed = random.Random(f"{self.seed}/{self.epoch}").getrandbits(32)
        return torch.randperm(self.length, generator=torch.Generator().manual_seed(mixed))


class EvaluationBatches(_RankBatches):
    """The rank's contiguous shard of a dataset in batches, so that every sample is read exactly once.

    Shards differ by at most one sample, and the earlier ranks own the larger ones. Every rank yields the same
    number of batches, none of them empty: forward passes may communicate (sharded weights, batch norm
    buffers), and a rank with one batch more would wait for the others forever. A rank's batch holds at most
    `global_batch_size / num_replicas` samples, rounded up, or one more where equal counts require it.

    Attributes:
        start: Index of the first sample of the rank's shard.
        stop: Index after its last sample.

    Yields:
        Indices: (B,) int64, ascending.

    Raises:
        ValueError: There are fewer samples than ranks.
    """

    def __init__(self, length: int, global_batch_size: int, rank: int, num_replicas: int) -> None:
        if length < num_replicas:
            remedy = f"type trainer.devices={length} or fewer" if length else "give it samples"
            raise ValueError(f"{length} samples can't be spread over {num_replicas} ranks: {remedy}")
        super().__init__(length, rank, num_replicas)
        self.start, self.stop = _near_equal_part(length, num_replicas, rank)
        self.steps = min(math.ceil(length / global_batch_size), length // num_replicas)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Tensor]:  # type: ignore[override]
        for step in range(self.steps):
            start, stop = _near_equal_part(self.stop - self.start, self.steps, step)
            yield torch.arange(self.start + start, self.start + stop)


def _near_equal_part(length: int, parts: int, index: int) -> tuple[int, int]:
    """Start and stop of one of `parts` consecutive parts of `length`; the earlier ones take the remainder."""
    size, remainder = divmod(length, parts)
    start = index * size + min(index, remainder)
    return start, start + size + (index < remainder)
