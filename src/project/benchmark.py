"""Measure how fast an experiment trains, make it faster, or compare with code without the template.

python -m project.benchmark benchmark.devices=[1,2,4] benchmark.strategies=[ddp,dp,fsdp]
python -m project.benchmark benchmark=optimize model/net=residual_cnn
python -m project.benchmark benchmark=overhead
"""

import os
import signal
import sys
from typing import Any

from project.launch.cli import command
from project.launch.local_job import run_local_job
from project.launch.run import Outcome, Run


def benchmark(config: dict[str, Any], run: Run) -> Outcome:
    """Measure one comparison after the other, each side in fresh processes; then show and write the results."""
    from project.benchmarking import report
    from project.config.build import locate
    from project.errors import UserError

    for name in (signal.SIGTERM, signal.SIGHUP):  # unwind, which ends the process that is being measured
        signal.signal(name, lambda number, _: sys.exit(128 + number))
    arguments = dict(config["benchmark"])
    measure_all = locate(arguments.pop("_target_"), "benchmark")
    load_before = os.getloadavg()
    results = measure_all(config, run, tell, **arguments)
    load = {"before": load_before, "after": os.getloadavg()}  # runnable processes over 1, 5 and 15 minutes

    report.write(run.folder, results, {"environment": run.environment, "load": load, "settings": config["benchmark"]})
    report.show(f"{run.folder.name}, load {load_before[0]:.1f} before and {load['after'][0]:.1f} after", results)
    if results.errors:
        told = "; ".join(dict.fromkeys(results.errors))
        raise UserError(f"{len(results.errors)} of {len(results.rows)} rows failed: {told}")
    return Outcome({}, files={"benchmark": str(run.folder / "benchmark.json")})


def tell(line: str) -> None:
    """Show which measurement runs; on a terminal over the last one."""
    if sys.stdout.isatty():
        print(f"\r\x1b[K{line}", end="", flush=True)
    else:
        print(line, flush=True)


main = command("benchmark", benchmark, job=run_local_job)

if __name__ == "__main__":
    main()
