"""Workers of a loader, at the end of a process that an error ends."""

import subprocess
import sys

import pytest

FAILS = """
from project.data.loaders import evaluation_loader

class Bad:
    def __len__(self): return 8
    def __getitem__(self, index): return index

iterator = iter(evaluation_loader(Bad(), list, 2, None, num_workers=2, persistent_workers=True))
next(iterator)
print("read", flush=True)
raise SystemExit(3)
"""


@pytest.mark.slow
def test_workers_that_are_still_there_do_not_keep_a_process_from_ending() -> None:
    # A name of the module holds on to the iterator, as the traceback of an error does.
    done = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (3, "read\n"), done.stderr
