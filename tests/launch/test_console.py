"""A console that goes away takes nothing else with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from project.launch.console import lasting, lasting_console


def test_what_a_closed_pipe_does_not_take_is_dropped() -> None:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w", buffering=1) as stream:
        kept = lasting(stream)
        kept.write("seen\n")
        assert os.read(reader, 100) == b"seen\n"
        os.close(reader)
        assert kept.write("lost\n") == 5
        kept.writelines(["lost\n", "lost\n"])
        kept.flush()
        stream.write("leads nowhere\n")
    assert kept.closed


def test_the_streams_are_as_before_afterwards() -> None:
    before = sys.stdout, sys.stderr
    with lasting_console():
        assert sys.stdout is not before[0]
        assert sys.stdout.encoding == before[0].encoding
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_are_not_the_next_file_that_is_opened(tmp_path: Path, closed: str) -> None:
    code = (
        "import os, sys; from project.launch.console import lasting_console\n"
        "with lasting_console():\n"
        f"    file = open({str(tmp_path / 'file')!r}, 'w')\n"
        "    assert file.fileno() > 2\n"
        "    print('out', flush=True); print('err', file=sys.stderr); sys.stdin.read()\n"
        "    assert all(os.get_inheritable(number) for number in (0, 1, 2))\n"
        "    file.write('whole')\n"
    )
    done = subprocess.run(["bash", "-c", f'exec "$0" -c "$1" {closed}', sys.executable, code], input="", check=False)
    assert done.returncode == 0
    assert (tmp_path / "file").read_text() == "whole"


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_training_goes_on_when_nobody_reads_what_it_prints(tmp_path: Path, devices: int) -> None:
    train = f"{sys.executable} -m project.train debug=fast trainer.accelerator=cpu trainer.devices={devices}"
    for command in (f"set -o pipefail; {train} name=piped | head -1 >/dev/null", f"{train} name=closed >&-"):
        done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("outputs/*/*/metrics.json"))) == 2
    (log,) = tmp_path.glob("outputs/piped/*/ranks/rank_0.log")
    assert "test" in log.read_text()
