"""The loops that one writes without a framework, in plain PyTorch: what the template is measured against.

python -m project.benchmarking.hand_written TASK.json
torchrun --nproc-per-node 2 -m project.benchmarking.hand_written TASK.json
"""

from __future__ import annotations

import fnmatch
import itertools
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from project.benchmarking import workload
from project.benchmarking.task import StepClock, Task


def train(task: Task) -> None:
    """Train for ``task.steps`` steps, and report when each ended."""
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = choose_device(task)
    if world_size > 1:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")

    loader = workload.train_loader(task.config, rank, world_size)
    net = workload.build_net(task.config).to(device)
    net = make_parallel(net, task.strategy, task.devices)
    optimizer, schedule = workload.build_optimizer(task.config, net.parameters(), task.steps)

    clock = StepClock(task.report, task.steps, task.warmup_steps)
    done = False
    for epoch in itertools.count():
        loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
        for batch in loader:
            image, label = batch["image"].to(device), batch["label"].to(device)
            loss = cross_entropy(net(image), label)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            if schedule is not None:
                schedule.step()
            done = clock.tick(epoch)
            if done:
                break
        if done:
            break

    if rank == 0:
        clock.write(loss.item())
    if world_size > 1:
        del net  # before the group that it communicates in
        dist.barrier()
        dist.destroy_process_group()


def validate(task: Task) -> None:
    """Loss and accuracy of the validation set, on one device; reports when each batch ended."""
    device = choose_device(task)
    loader = workload.build_data(task.config).val_dataloader()
    net = workload.build_net(task.config).to(device).eval()
    clock = StepClock(task.report, len(loader), task.warmup_steps)
    loss, num_right, num_samples = torch.zeros((), device=device), torch.zeros((), device=device), 0
    with torch.inference_mode():
        for batch in loader:
            image, label = batch["image"].to(device), batch["label"].to(device)
            logits = net(image)
            loss += cross_entropy(logits, label, reduction="sum")
            num_right += (logits.argmax(dim=1) == label).sum()
            num_samples += len(label)
            clock.tick(0)
    clock.write(loss.item() / num_samples)


def make_parallel(net: nn.Module, strategy: str, devices: int) -> nn.Module:
    """The wrapper that torch has for a strategy."""
    if strategy == "ddp":
        return DistributedDataParallel(net)
    if strategy == "dp":
        on_gpu = next(net.parameters()).is_cuda
        return nn.DataParallel(net, list(range(devices))) if on_gpu else PartsInTurn(net, devices)
    if strategy == "fsdp":
        plan = getattr(net, "parallel_plan", None)
        for pattern in plan.blocks if plan else ():
            for name, block in net.named_modules():
                if fnmatch.fnmatchcase(name, pattern) and name.count(".") == pattern.count("."):
                    fully_shard(block)
        fully_shard(net)
    return net


class PartsInTurn(nn.Module):
    """What data parallelism is on a CPU, where ``nn.DataParallel`` does nothing: parts of the batch, one by one."""

    def __init__(self, net: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.net = net
        self.num_parts = num_parts

    def forward(self, image: Tensor) -> Tensor:
        return torch.cat([self.net(part) for part in image.chunk(self.num_parts)])


def choose_device(task: Task) -> torch.device:
    if task.config["trainer"]["accelerator"] in ("auto", "gpu", "cuda") and torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


if __name__ == "__main__":
    the_task = Task.from_command_line()
    validate(the_task) if the_task.measure == "validate" else train(the_task)
