"""A run folder belongs to one run, and tells all of it."""

import datetime
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf

from project.errors import UserError
from project.launch import run_folder, run_state
from project.launch.run import Outcome


@pytest.fixture
def one_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time stands still."""

    class Still(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> "Still":
            return cls(2026, 1, 2, 3, 4, 5, tzinfo=tz)

    monkeypatch.setattr(run_folder.datetime, "datetime", Still)


@pytest.mark.usefixtures("one_second")
def test_runs_of_one_second_get_folders_of_their_own(tmp_path: Path) -> None:
    names = [run_folder.claim(tmp_path / "new" / "parent", "evaluate_").name for _ in range(3)]
    stamp = "evaluate_2026-01-02_03-04-05"
    assert names == [stamp, f"{stamp}_2", f"{stamp}_3"]


@pytest.mark.usefixtures("one_second")
def test_claims_at_the_same_time_never_get_the_same_folder(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(lambda _: run_folder.claim(tmp_path / "runs"), range(32)))
    assert len(set(folders)) == 32
    assert all(folder.is_dir() for folder in folders)


def test_a_claimed_folder_is_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder.claim(Path("outputs"))
    assert folder.is_absolute()
    assert folder.parent == (tmp_path / "outputs").resolve()


@pytest.fixture(params=["a_file", "below_a_file", "no_place_for_folders", "dangling_link"])
def impossible(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A place where no folder can be made, not even by root."""
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere" / "else")
    return {
        "a_file": tmp_path / "file",
        "below_a_file": tmp_path / "file" / "below",
        "no_place_for_folders": Path("/proc/project"),
        "dangling_link": tmp_path / "link",
    }[request.param]


def test_a_folder_that_cant_be_claimed_is_told_with_what_to_type(impossible: Path) -> None:
    with pytest.raises(UserError, match=r"type paths\.outputs=FOLDER"):
        run_folder.claim(impossible)


def test_a_folder_that_cant_be_taken_is_told_with_what_to_type(impossible: Path) -> None:
    with pytest.raises(UserError, match=r"type paths\.run_dir=FOLDER"):
        run_folder.take(impossible / "below" if impossible.is_symlink() else impossible)


def test_a_process_that_asks_again_gets_the_same_new_folder(tmp_path: Path) -> None:
    first = run_folder.new_folder(str(tmp_path), "sweep_")
    assert run_folder.new_folder(str(tmp_path), "sweep_") == first
    assert run_folder.new_folder(str(tmp_path), "other_") != first
    assert Path(first).is_dir()


@pytest.mark.parametrize("there", [True, False])
def test_a_chosen_folder_is_made_where_it_is_not_there(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "a" / "b"
    if there:
        folder.mkdir(parents=True)
        (folder / "notes.txt").write_text("mine")
    assert run_folder.take(folder) == folder.resolve()
    assert folder.is_dir()


def test_a_chosen_folder_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    run_folder.record(run_folder.take(tmp_path / "run"), {}, [], {})
    with pytest.raises(UserError, match=r"holds a run already: type another paths\.run_dir"):
        run_folder.take(tmp_path / "run")


@pytest.mark.parametrize("trained", [True, False])
def test_a_mistake_leaves_the_records_of_a_folder_that_was_taken_up_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trained: bool
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    run_folder.record(tmp_path, {"epochs": 60}, ["a=1"], {})
    (tmp_path / "metrics.json").write_text("{}")
    with run_state.recorded(tmp_path):
        run_state.record_first_step(tmp_path)
    before = {path: path.read_text() for path in tmp_path.iterdir()}
    with pytest.raises(UserError), run_folder.restored_if_refused(tmp_path):
        (tmp_path / "metrics.json").unlink()
        (tmp_path / run_folder.RESUMED).write_text("again\n")
        run_folder.record(tmp_path, {"epochs": 2}, ["a=1", "b=2"], {})
        with run_state.recorded(tmp_path):
            if trained:
                run_state.record_first_step(tmp_path)
            raise UserError("type a=2")
    after = {path: path.read_text() for path in tmp_path.iterdir()}
    assert (after == before) is not trained


def test_a_mistake_before_a_resumed_run_begins_is_taken_back_too(tmp_path: Path) -> None:
    with run_state.recorded(tmp_path):
        run_state.record_first_step(tmp_path)
    with pytest.raises(UserError), run_folder.restored_if_refused(tmp_path):
        (tmp_path / run_folder.RESUMED).write_text("again\n")
        raise UserError("type a=2")
    assert [path.name for path in tmp_path.iterdir()] == [run_state.FILE]


def test_a_chosen_folder_can_be_taken_again_after_a_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(2):
        run_folder.take(tmp_path)
        with pytest.raises(UserError, match="type a=2"), run_folder.restored_if_refused(tmp_path):
            run_folder.record(tmp_path, {}, [], {})
            raise UserError("type a=2")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def refused(outputs: Path, error: BaseException, trained: bool = False, wrote: str | None = None) -> None:
    """A run that begins, and ends by an error, perhaps after a step or with a file."""
    made = run_folder.missing(outputs / "mlp")
    folder = run_folder.claim(outputs / "mlp")
    with run_folder.removed_if_refused(folder, made), run_state.recorded(folder):
        if trained:
            run_state.record_first_step(folder)
        if wrote is not None:
            (folder / wrote).parent.mkdir(exist_ok=True)
            (folder / wrote).write_text("x")
        raise error


@pytest.mark.parametrize("there", [0, 1, 2])
def test_a_mistake_before_the_first_step_takes_along_the_folders_that_were_made_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: int
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    before = [tmp_path / "outputs", tmp_path / "outputs" / "mlp"][:there]
    for folder in before:
        folder.mkdir()
    with pytest.raises(UserError):
        refused(tmp_path / "outputs", UserError("type a=2"))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("error", "trained", "wrote"),
    [
        (UserError("a"), True, None),
        (UserError("a"), False, "predictions.csv.rank_0"),
        (UserError("a"), False, "checkpoints/best.ckpt"),
        (RuntimeError("a"), False, None),
        (KeyboardInterrupt(), False, None),
    ],
    ids=["trained", "predicted", "saved", "no_mistake", "ctrl_c"],
)
def test_other_ends_leave_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException, trained: bool, wrote: str | None
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    with pytest.raises(type(error)):
        refused(tmp_path, error, trained, wrote)
    (state,) = tmp_path.glob("mlp/*/state.json")
    assert json.loads(state.read_text())["trained"] == trained


@pytest.mark.parametrize("order", ["abc", "bca", "cba"])
@pytest.mark.parametrize("there", [True, False])
def test_of_runs_that_are_refused_together_the_last_takes_the_folders_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str, there: bool
) -> None:
    monkeypatch.delenv("HYDRA_FULL_ERROR", raising=False)
    kept = tmp_path / "outputs" / "mlp" if there else tmp_path
    if there:
        (kept / "of_a_run").mkdir(parents=True)
    before = set(tmp_path.rglob("*"))
    begun = {}
    for name in "abc":
        made = run_folder.missing(tmp_path / "outputs" / "mlp")
        begun[name] = run_folder.claim(tmp_path / "outputs" / "mlp"), made
    for name in order:
        folder, made = begun[name]
        with pytest.raises(UserError), run_folder.removed_if_refused(folder, made), run_state.recorded(folder):
            raise UserError("type a=2")
    assert set(tmp_path.rglob("*")) == before


def test_the_folder_in_which_the_user_is_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_folder.claim(tmp_path / "mlp")
    assert run_folder.missing(Path("mlp")) == [tmp_path / "mlp"]


def test_a_folder_whose_run_was_interrupted_before_it_was_written_down_goes(tmp_path: Path) -> None:
    folder = run_folder.claim(tmp_path)
    with pytest.raises(KeyboardInterrupt), run_folder.removed_if_refused(folder, []):
        (folder / "config.yaml").write_text("a: 1")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_a_run_is_recorded_so_that_it_can_be_read_back(tmp_path: Path) -> None:
    config = {"name": "ä", "lr": 1e-3, "betas": [0.9, 0.999], "nothing": None, "net": {"_target_": "a.B"}}
    overrides = ["optimizer.lr=1e-3", "+x={a: 1}", "name='a b'"]
    run_folder.record(tmp_path, config, overrides, {"host": "here"})
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml")) == config
    assert OmegaConf.to_container(OmegaConf.load(tmp_path / "overrides.yaml")) == overrides
    assert json.loads((tmp_path / "environment.json").read_text()) == {"host": "here"}


def test_a_folder_that_is_gone_is_told_with_what_to_type(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"can't be written to .*: type paths\.outputs=FOLDER"):
        run_folder.record(tmp_path / "gone", {}, [], {})


def test_metrics_are_written_whole_and_nothing_else_stays(tmp_path: Path) -> None:
    run_folder.write_metrics(tmp_path, Outcome({"val/loss": 0.5}, objective=0.9, checkpoint="best.ckpt", steps=3))
    run_folder.write_metrics(tmp_path, Outcome({"val/loss": 0.25}, objective=0.9, checkpoint="best.ckpt", steps=3))
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.json"]
    told = json.loads((tmp_path / "metrics.json").read_text())
    assert told["metrics"] == {"val/loss": 0.25}
    assert (told["objective"], told["checkpoint"], told["steps"], told["epochs"]) == (0.9, "best.ckpt", 3, None)


def test_metrics_that_are_no_numbers_still_make_valid_json(tmp_path: Path) -> None:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    run_folder.write_metrics(
        tmp_path, Outcome({"a": float("nan"), "b": float("inf"), "c": 1.0}, objective=float("nan"))
    )
    told = json.loads((tmp_path / "metrics.json").read_text(), parse_constant=refuse)
    assert told["metrics"]["c"] == 1.0


def test_the_environment_tells_versions_machine_and_git_state() -> None:
    told = json.loads(json.dumps(run_folder.describe_environment()))
    assert torch.__version__.startswith(told["packages"]["torch"])  # some builds add "+cu130"
    assert all(told["packages"].values())
    assert told["cores"] >= 1
    assert datetime.datetime.fromisoformat(told["time"]).tzinfo is not None
    source = Path(run_folder.__file__).parent
    head = subprocess.run(["git", "-C", source, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if head.returncode == 0:
        assert told["git"]["commit"] == head.stdout.strip()
        assert isinstance(told["git"]["dirty"], bool)
    else:
        assert told["git"] is None


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 10)])
def test_a_machine_without_git_has_no_git_state(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(run_folder.subprocess, "run", fail)
    assert run_folder.describe_environment()["git"] is None
