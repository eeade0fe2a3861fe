"""TensorBoard over chosen runs, under the names that a sweep gave them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from project.errors import UserError
from project.sweep.ledger import LedgerRun


def link(runs: Sequence[LedgerRun], folder: Path) -> list[str]:
    """Link the event files of runs into ``folder``, one link a run; their names.

    Links, because TensorBoard's own list of folders can't have names with a comma.

    Raises:
        UserError: no run has event files.
    """
    names = []
    for run in runs:
        events = run.folder / "tensorboard"
        if events.is_dir():
            target = folder / run.name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(events.resolve(), target_is_directory=True)
            names.append(run.name)
    if not names:
        raise UserError(f"none of these {len(runs)} run(s) wrote for TensorBoard: choose others, or logger=tensorboard")
    return names


def serve(runs: Sequence[LedgerRun], port: int) -> None:
    """Show exactly these runs, until Ctrl-C."""
    with tempfile.TemporaryDirectory(prefix="project-runs-") as folder:
        for name in link(runs, Path(folder)):
            print(name)
        command = [sys.executable, "-m", "tensorboard.main", "--logdir", folder, "--port", str(port)]
        try:
            code = subprocess.run(command, check=False).returncode
        except KeyboardInterrupt:
            return
    if code:
        raise UserError(f"TensorBoard ended with exit code {code}; is port {port} taken? type --port ANOTHER")
