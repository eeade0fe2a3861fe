"""The commands, called from Python."""

import os
from pathlib import Path

import pytest

from project.errors import UserError
from project.launch.call import call

QUIET = ("debug=fast", "trainer.enable_progress_bar=false", "trainer.enable_model_summary=false", "logger=none")


@pytest.mark.slow
def test_a_run_says_where_its_folder_is_and_its_checkpoint_can_be_evaluated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):
        monkeypatch.delenv(name, raising=False)  # of other tests
    call("train", *QUIET, f"paths.outputs={tmp_path}")  # what an import sets once for the process is there
    call("evaluate", f"ckpt_path={max(tmp_path.rglob('best.ckpt'))}", f"paths.outputs={tmp_path}", QUIET[1])
    before = dict(os.environ)
    outcome = call("train", *QUIET, f"paths.outputs={tmp_path}")
    assert outcome.folder is not None
    assert (Path(outcome.folder) / "metrics.json").is_file()
    assert outcome.first_step_s is not None
    assert outcome.first_step_s < 60  # from the call on, not from the start of this process
    again = call("evaluate", f"ckpt_path={outcome.checkpoint}", f"paths.outputs={tmp_path}", QUIET[1])
    assert again.metrics["test/loss"] == pytest.approx(outcome.metrics["test/loss"])
    assert dict(os.environ) == before  # no seed or port of one run is there for the next


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (("trian",), "type train, evaluate or predict"),
        (("train", "data=digts"), "type data=digits"),
        (("train", "optimizer.rl=1"), "did you mean optimizer.lr?"),
        (("train", "trainer.max_epochs=-3"), "type trainer.max_epochs="),
        (("train", "ckpt_path=best.ckpt"), "type resume=FOLDER"),
        (("train", "+ckpt_path=best.ckpt"), "type resume=FOLDER"),
        (("evaluate",), "type ckpt_path="),
    ],
)
def test_what_cant_be_is_told_in_a_sentence(arguments: tuple[str, ...], advice: str) -> None:
    with pytest.raises(UserError) as info:
        call(*arguments)
    assert advice in str(info.value)
