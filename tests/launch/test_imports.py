"""Imports without a search for garbage, among which none is looked for later either."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from project.launch.imports import import_for_good


@pytest.fixture
def thawed() -> None:  # type: ignore[misc]
    yield  # type: ignore[misc]
    gc.unfreeze()
    gc.enable()


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_before_whatever_happens(
    collects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, thawed: None
) -> None:
    (tmp_path / f"looks_{collects}.py").write_text("import gc\ncollects = gc.isenabled()\n")
    monkeypatch.syspath_prepend(tmp_path)
    (gc.enable if collects else gc.disable)()
    import_for_good(f"looks_{collects}")
    assert not sys.modules[f"looks_{collects}"].collects
    assert gc.isenabled() == collects
    assert gc.get_freeze_count() > 10_000
    with pytest.raises(ImportError):
        import_for_good("no_such_module")
    assert gc.isenabled() == collects


def test_what_came_after_the_import_is_not_frozen_when_it_is_asked_for_again(thawed: None) -> None:
    gc.unfreeze()
    import_for_good("json", "sys")
    assert gc.get_freeze_count() == 0


SERVER = """
import sys, types
import project.launch.imports as imports
imports.WITHOUT_TORCH = ("colorsys",)
imports.NEEDED_BY_RANKS = ("fractions", "decimal")
imports.NEEDED_BY_TRAINING = ("chunk",)
import project.launch.fork_server
import gc
assert gc.isenabled() and gc.get_freeze_count() > 1000
assert {"colorsys", "fractions", "decimal", "chunk"} <= sys.modules.keys()
assert "torch" not in sys.modules
import os
assert {"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & os.environ.keys()
"""


def test_the_fork_server_has_imported_what_ranks_need_and_freezes_it() -> None:
    subprocess.run([sys.executable, "-c", SERVER], check=True, timeout=60)
