"""What is typed with a plus is read, or refused."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from omegaconf import DictConfig

from project.config.unread_keys import check_added
from project.errors import UserError
from project.launch.job import run_job
from project.launch.local_job import run_local_job
from project.launch.run import Outcome

Compose = Callable[..., DictConfig]


UNREAD = {
    "+ckpt_path=x": "type resume=FOLDER to go on with a run, or python -m project.evaluate ckpt_path=FILE to test its",
    "+lr=0.1": "did you mean optimizer.lr?",
    "++zzz=1": "leave it out, or add it to the class that takes it, as in +model.zzz=VALUE",
    "+qqq.a.b=1": "leave it out",
    "+yyy=null": "leave it out",
    "+optimizer@www.of=sgd": "leave it out",
    "+benchmark=overhead": "did you mean",
}


@pytest.fixture(scope="module")
def with_unread(compose: Compose) -> DictConfig:
    """All at once: each composition takes its time."""
    return compose(*UNREAD)


@pytest.mark.parametrize("typed", UNREAD)
def test_what_is_added_at_the_top_and_nothing_reads_is_refused(with_unread: DictConfig, typed: str) -> None:
    key = typed.lstrip("+").partition("=")[0].partition("@")
    top = (key[2] or key[0]).partition(".")[0]
    with pytest.raises(
        UserError, match=f"would be without effect, because nothing reads {top}: {re.escape(UNREAD[typed])}"
    ):
        check_added(with_unread, ["seed=1", "+model.width=2", typed], "train")


@pytest.mark.parametrize(
    "overrides",
    [
        ["+callbacks.mine._target_=a.B", "+trainer.profiler=simple", "++model.width=3", "+optimizer.foreach=true"],
        ["+shared=3", "+more.depth=2", "model.net.width=${shared}", "model.net.depth=${oc.select:more.depth,1}"],
        ["++seed=1", "++monitor=null", "+scheduler@model.second=one_cycle", "+sweep.sampler.n_startup_trials=2"],
    ],
    ids=["arguments_of_classes", "referred_to", "there_already"],
)
def test_what_is_added_and_something_reads_passes(compose: Compose, overrides: list[str]) -> None:
    check_added(compose(*overrides), overrides, "train")
    check_added(compose(*overrides, name="benchmark"), overrides, "benchmark")


def test_what_evaluation_reads_of_a_run_can_be_added_to(compose: Compose) -> None:
    overrides = ["ckpt_path=x", "++optimizer.lr=1", "+model.width=3"]
    check_added(compose(*overrides, name="evaluate"), overrides, "evaluate")
    with pytest.raises(UserError, match="nothing reads monitor"):
        check_added(compose("+monitor=x", name="evaluate"), ["+monitor=x"], "evaluate")


@pytest.mark.parametrize(("run", "command"), [(run_job, "train"), (run_local_job, "benchmark")])
def test_jobs_are_checked_before_they_make_a_folder(
    compose: Compose, tmp_path: Path, run: Callable[..., Outcome], command: str
) -> None:
    typed = [f"paths.outputs={tmp_path}", "+zzz=1"]
    with pytest.raises(UserError, match="nothing reads zzz"):
        run(f"project.{command}:{command}", compose(*typed, name=command), typed, command)
    assert list(tmp_path.iterdir()) == []
