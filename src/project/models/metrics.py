"""Metrics that torchmetrics has not, or not exactly enough."""

import torch
from torch import Tensor
from torchmetrics import Metric


class SampleMean(Metric):
    """Mean over the samples of all batches and ranks, summed in float64 (in float32 where MPS is the device).

    Sums in float32 depend in their seventh digit on how the samples were split. torchmetrics' ``MeanMetric`` goes
    back to float32 inputs whenever it is moved to a device, even after ``set_dtype``.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        dtype = torch.float32 if torch.backends.mps.is_available() else torch.float64
        self.add_state("total", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=dtype), dist_reduce_fx="sum")

    def update(self, value: Tensor, weight: float = 1.0) -> None:
        """Add values of any shape; each counts as ``weight`` samples."""
        self.total += value.detach().to(self.total.dtype).sum() * weight
        self.count += value.numel() * weight

    def compute(self) -> Tensor:
        return self.total / self.count
