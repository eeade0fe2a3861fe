"""When a process began, to a hundredth of a second."""

import subprocess
import sys
import time


def test_a_process_knows_when_it_began() -> None:
    code = "from project.launch.clock import process_started_at; print(process_started_at())"
    before = time.time()
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    # Two hundredths: the kernel counts in hundredths. psutil's is early by up to a second.
    assert before - 0.02 <= float(told) <= time.time()
