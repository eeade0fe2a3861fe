"""What a sweep costs besides its jobs: ten trivial ones, against the start-up of one and ten times its work.

python tests/benchmarks/sweep_cost.py [REPEATS]

The start-up of a command lasts to the end of its first training step, its work from there to its end. Both and the
sweep are measured in one run, in turns, because machines are shared: the ratio of the medians is what counts. Exits
with 1 where the sweep costs more than 1.5 start-ups.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = 10
LIMIT = 1.5  # start-ups


def command_s(folder: Path, *arguments: str) -> float:
    """Seconds from the start of ``python -m project.train`` to its end."""
    start = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "project.train", *arguments, "debug=fast", f"paths.outputs={folder}"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    return time.perf_counter() - start


def first_step_s(folder: Path) -> float:
    """Seconds to the end of the first training step, as the newest run itself reports."""
    newest = max(folder.rglob("metrics.json"), key=os.path.getmtime)
    return float(json.loads(newest.read_text())["first_step_s"])


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seeds = ",".join(map(str, range(JOBS)))
    start_ups: list[float] = []
    works: list[float] = []
    sweeps: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for _ in range(repeats):
            whole_s = command_s(folder)
            start_ups.append(first_step_s(folder))
            works.append(whole_s - start_ups[-1])
            sweeps.append(command_s(folder, "-m", f"seed={seeds}"))
    start_up_s, work_s, sweep_s = map(statistics.median, (start_ups, works, sweeps))
    cost = (sweep_s - JOBS * work_s) / start_up_s
    print(f"one command: start-up {start_up_s:.2f} s, work {work_s:.2f} s")
    print(f"{JOBS} jobs: {sweep_s:.2f} s, which is {JOBS} times the work and {cost:.2f} start-ups (at most {LIMIT})")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return int(cost > LIMIT)


if __name__ == "__main__":
    sys.exit(main())
