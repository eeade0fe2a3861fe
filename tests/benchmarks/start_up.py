"""How long until the first training step, against importing the libraries alone.

python tests/benchmarks/start_up.py [REPEATS]

Both are measured in one run, in turns, because machines are shared: the ratio of the medians is what counts.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

IMPORTS = "import lightning, torchmetrics, sklearn.datasets, torch.utils.tensorboard"


def import_s() -> float:
    """Seconds that Python takes to import what a run needs."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", IMPORTS], check=True)
    return time.perf_counter() - start


def first_step_s(devices: int, folder: Path) -> float:
    """Seconds from the start of the command to the end of the first training step, as the run itself reports."""
    arguments = ["debug=fast", f"trainer.devices={devices}", f"paths.outputs={folder}"]
    subprocess.run(
        [sys.executable, "-m", "project.train", *arguments],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    newest = max(folder.rglob("metrics.json"), key=os.path.getmtime)
    return float(json.loads(newest.read_text())["first_step_s"])


def main() -> None:
    repeats = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    imports: list[float] = []
    steps: dict[int, list[float]] = {1: [], 4: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(repeats):
            imports.append(import_s())
            for devices, times in steps.items():
                times.append(first_step_s(devices, Path(folder)))
    reference = statistics.median(imports)
    print(f"imports: {reference:.2f} s ({min(imports):.2f} to {max(imports):.2f})")
    for devices, times in steps.items():
        median = statistics.median(times)
        spread = f"{min(times):.2f} to {max(times):.2f}"
        print(f"first step, {devices} rank(s): {median:.2f} s ({spread}), {median / reference:.2f} times the imports")


if __name__ == "__main__":
    main()
