"""What a sweep costs besides its jobs: ten trivial ones, against the start-up of one and ten times its work.

python tests/benchmarks/sweep_cost.py [REPEATS]

All is measured in one run, in turns, because machines are shared: the ratio of the medians is what counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

JOBS = 10
LIMIT = 1.5  # times the start-up
TRIVIAL = (
    "debug=fast",
    "logger=none",
    "callbacks=none",
    "trainer.enable_progress_bar=false",
    "trainer.enable_model_summary=false",
)
WORK = """
import sys, time
from project.launch.call import call
call("train", *sys.argv[1:])
start = time.perf_counter()
call("train", *sys.argv[1:])
print("work", time.perf_counter() - start)
"""


def command_s(folder: Path, *arguments: str) -> float:
    """Seconds from the start of ``python -m project.train`` to its end."""
    start = time.perf_counter()
    python(folder, "-m", "project.train", *arguments)
    return time.perf_counter() - start


def work_s(folder: Path) -> float:
    """Seconds of one job in a process that has done it before."""
    return float(python(folder, "-c", WORK).rpartition("work")[2])


def python(folder: Path, *arguments: str) -> str:
    """Run Python with what all jobs are given; its output."""
    return subprocess.run(
        [sys.executable, *arguments, *TRIVIAL, f"paths.outputs={folder}"],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout


def main() -> int:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    seeds = ",".join(map(str, range(JOBS)))
    one: list[float] = []
    work: list[float] = []
    sweep: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            one.append(command_s(Path(folder)))
            work.append(work_s(Path(folder)))
            sweep.append(command_s(Path(folder), "-m", f"seed={seeds}"))
    one_s, each_s, all_s = map(statistics.median, (one, work, sweep))
    start_up_s = one_s - each_s
    limit_s = LIMIT * start_up_s + JOBS * each_s
    print(f"one command {one_s:.2f} s, of which a job's work {each_s:.2f} s and start-up {start_up_s:.2f} s")
    print(f"{JOBS} jobs {all_s:.2f} s: {(all_s - JOBS * each_s) / start_up_s:.2f} start-ups and {JOBS} times the work")
    print(f"allowed {limit_s:.2f} s; {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    return int(all_s > limit_s)


if __name__ == "__main__":
    sys.exit(main())
