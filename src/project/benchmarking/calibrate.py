"""How wide a net must be for its training step, or its forward pass alone, to take a given time on this machine.

python -m project.benchmarking.calibrate STEP_MS TASK.json
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from project.benchmarking import workload
from project.benchmarking.hand_written import choose_device
from project.benchmarking.task import Task

MARGIN = 1.1  # the step is to be no shorter when the machine is quieter
WIDEST = 16384
MULTIPLE = 16  # widths are such: attention heads must divide them


def find_width(task: Task, step_ms: float) -> int:
    """``model.net.width`` at which a step of one of ``task.devices`` ranks takes so long, on its share of the batch."""
    low, high = 32, 64
    while measure_step_ms(task, high) < MARGIN * step_ms and high < WIDEST:
        low, high = high, 2 * high
    while high - low > max(MULTIPLE, 0.06 * low):
        middle = MULTIPLE * round((low * high) ** 0.5 / MULTIPLE)
        if measure_step_ms(task, middle) < MARGIN * step_ms:
            low = middle
        else:
            high = middle
    return high


def measure_step_ms(task: Task, width: int) -> float:
    config = with_width(task.config, width)
    device = choose_device(task)
    batch = next(iter(workload.train_loader(config, 0, task.devices)))
    image, label = batch["image"].to(device), batch["label"].to(device)
    net = workload.build_net(config).to(device)
    optimizer, _ = workload.build_optimizer(config | {"scheduler": None}, net.parameters(), 1)
    times_s = []
    for _ in range(15):
        start = time.perf_counter()
        with torch.inference_mode(task.measure == "validate"):
            loss = cross_entropy(net(image), label)
        if task.measure == "train":
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        loss.item(), next(net.parameters()).flatten()[0].item()  # on a GPU, wait for the step
        times_s.append(time.perf_counter() - start)
    return 1000 * statistics.median(times_s[5:])


def with_width(config: dict[str, Any], width: int) -> dict[str, Any]:
    model = config["model"]
    return config | {"model": model | {"net": model["net"] | {"width": width}}}


if __name__ == "__main__":
    target_ms = float(sys.argv.pop(1))
    the_task = Task.from_command_line()
    Path(the_task.report).write_text(json.dumps({"width": find_width(the_task, target_ms)}))
