"""What a sweep's folder says of it in ``sweep.json``: readable while it runs, and after it was killed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from project.errors import UserError
from project.files import write_whole
from project.sweep.jobs import Job

FILE = "sweep.json"


@dataclass
class Sweep:
    """A sweep and the jobs that it has begun.

    Attributes:
        folder: Where it is.
        kind: ``grid`` or ``optuna``.
        objectives: What is compared, ``{metric: "min" or "max"}``.
        fixed: What was typed for all jobs.
        typed: All that was typed, but for the folder.
        total: Jobs that it will have, as far as that is known.
        experiment: The one it starts from: a name, or the path of a file outside of ``conf``.
        jobs: Those begun, in their order.
        seed: Drawn once for all jobs, where ``seed=null``.
        by_monitor: Whether what is compared is what the jobs monitor; then their best value counts, and not the last.
        started_at: Seconds since 1970.
    """

    folder: Path
    kind: str
    objectives: dict[str, str]
    fixed: list[str]
    total: int
    typed: list[str] = field(default_factory=list)
    experiment: str | None = None
    jobs: list[Job] = field(default_factory=list)
    seed: int | None = None
    by_monitor: bool = True
    started_at: float = field(default_factory=time.time)

    def write(self) -> None:
        """Write ``sweep.json``."""
        plain = asdict(self) | {"jobs": [asdict(job) | {"folder": job.folder.name} for job in self.jobs]}
        del plain["folder"]
        write_whole(self.folder / FILE, json.dumps(plain, indent=2) + "\n")


def read(folder: Path) -> Sweep:
    """The sweep of a folder.

    Raises:
        UserError: no sweep of ours is there.
    """
    try:
        plain = json.loads((folder / FILE).read_text())
        jobs = [Job(**{**job, "folder": folder / job["folder"]}) for job in plain.pop("jobs")]
        return Sweep(folder=folder, jobs=jobs, **plain)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{folder / FILE} is damaged ({error}): begin a new sweep") from error
    except OSError as error:
        raise UserError(
            f"{folder} is no folder of a sweep, it has no {FILE}: type the folder that the sweep named, as in "
            "outputs/digits_mlp/sweep_<date>_<time>"
        ) from error
