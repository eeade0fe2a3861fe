"""Imports without a search for garbage, and a fork server whose copies have everything."""

import gc
import json
import subprocess
import sys

import pytest

from project.launch.imports import uncollected


@pytest.mark.parametrize("collects", [True, False])
def test_collection_is_as_before_whatever_happens(collects: bool) -> None:
    (gc.enable if collects else gc.disable)()
    try:
        with uncollected():
            assert not gc.isenabled()
        assert gc.isenabled() == collects
        with pytest.raises(ImportError), uncollected():
            import no_such_module  # type: ignore[import-not-found]  # noqa: F401
        assert gc.isenabled() == collects
    finally:
        gc.enable()


SERVER = """
import gc, json, sys
import project.launch.fork_server
needed = ["lightning", "torchmetrics", "torch.utils.tensorboard", "project.tracking.tracker", "project.data.digits"]
print(json.dumps([gc.isenabled(), gc.get_freeze_count(), [name for name in needed if name not in sys.modules],
                  "sklearn" in sys.modules]))
"""


def test_the_fork_server_has_imported_what_ranks_need_and_freezes_it() -> None:
    done = subprocess.run([sys.executable, "-c", SERVER], capture_output=True, text=True, check=True, timeout=120)
    collects, frozen, missing, needless = json.loads(done.stdout)
    assert collects
    assert frozen > 100_000
    assert missing == []
    assert not needless  # half a second that only some experiments need
