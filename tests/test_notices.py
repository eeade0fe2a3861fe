"""Notices are sentences; other warnings stay as they are."""

import subprocess
import sys

import pytest

from project.notices import Notice, notice

SCRIPT = """
import warnings
from project.notices import notice, show_notices_plainly
show_notices_plainly()
show_notices_plainly()
notice("No picture for val")
warnings.warn("another", stacklevel=1)
"""


def test_a_notice_is_shown_as_it_stands_and_another_warning_with_its_place() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, timeout=120)
    lines = [line for line in done.stderr.splitlines() if "LeafSpec" not in line and "treespec" not in line]
    assert lines == ["No picture for val", "<string>:7: UserWarning: another"]


def test_a_notice_can_be_caught_as_a_warning() -> None:
    with pytest.warns(Notice, match="told"):
        notice("told")
