"""What the tracker costs rank 0 for each interval of a training on many ranks, which are simulated.

python tests/benchmarks/tracking_many_ranks.py --ranks 1024
"""

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from project.tracking.arrivals import KEPT, Arrivals, Marks, of_entries
from project.tracking.dashboard import Dashboard
from project.tracking.overview import Overview
from project.tracking.remedies import Facts
from project.tracking.windows import NUM_FIELDS


def simulated(num_ranks: int) -> tuple[torch.Tensor, Arrivals]:
    """What ranks in a mesh of rows and columns gather, every field and arrival known, and what the first one knows."""
    came = [
        of_entries(
            [
                (1_700_000_000_000_000_000 + 10_000_000 * number + 1000 * rank, "all_gather", number, group)
                for number in range(KEPT)
                for group in (f"row {rank // 8}" if number % 2 else f"column {rank % 8}",)
            ],
            Marks(),
        )
        for rank in range(num_ranks)
    ]
    values = 1 + torch.rand(num_ranks, NUM_FIELDS, dtype=torch.float64)
    packed = torch.tensor([rank.packed() for rank in came], dtype=torch.float64)
    return torch.cat([values, packed], dim=1), came[0]


def interval_ms(num_ranks: int, intervals: int, folder: Path) -> list[tuple[float, float]]:
    """Milliseconds of each interval, of a clock on the wall and of the thread's CPU time.

    They go into who is late, the verdict, the sum of all windows, and TensorBoard's records.
    """
    rows, own = simulated(num_ranks)
    dashboard = Dashboard(folder, num_replicas=num_ranks)
    overview = Overview(lambda _: None, dashboard)
    took_ms = []
    for step in range(intervals):
        wall, cpu = time.perf_counter(), time.thread_time()
        overview.add(step, rows, own, Facts())
        took_ms.append((1e3 * (time.perf_counter() - wall), 1e3 * (time.thread_time() - cpu)))
        time.sleep(0.05)  # the thread that writes has as long as that, at least
    dashboard.close()
    return took_ms


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1024)
    parser.add_argument("--intervals", type=int, default=30)
    parser.add_argument("--at-most-ms", type=float, default=20.0, help="exit code 1 if the CPU time is longer")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        took_ms = interval_ms(arguments.ranks, arguments.intervals, Path(folder))[1:]
    for name, values in zip(("wall", "CPU"), zip(*took_ms, strict=True), strict=True):
        median = statistics.median(values)
        spread = f"{min(values):.1f} to {max(values):.1f}"
        print(f"{arguments.ranks} ranks, an interval: {median:.1f} ms of {name} time ({spread})")
    sys.exit(median > arguments.at_most_ms)


if __name__ == "__main__":
    main()
