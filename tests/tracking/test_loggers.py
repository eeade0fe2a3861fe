"""Loggers beside TensorBoard: what it gets they get too, from rank 0 alone, and a run that goes on stays one run."""

import csv
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger
from matplotlib.figure import Figure
from omegaconf import OmegaConf
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from comparison import Run
from composing import compose_config
from project.config import preflight
from project.errors import UserError
from project.tracking.dashboard import Dashboard, summary_page
from project.tracking.logger_state import keep, kept, title
from tracking.test_dashboard import TWO, VERDICT

QUIET = ("progress=none", "trainer.enable_model_summary=false")
CURVES = {"train/loss", "train/lr", "train/grad_norm", "val/accuracy", "test/accuracy", "speed/samples_per_s"}


def table(file: Path) -> dict[int, dict[str, float]]:
    """The rows of a step together, without empty cells."""
    steps: dict[int, dict[str, float]] = {}
    with file.open(newline="") as lines:
        for row in csv.DictReader(lines):
            steps.setdefault(int(row["step"]), {}).update({key: float(cell) for key, cell in row.items() if cell})
    return steps


def test_other_loggers_get_the_curves_of_all_and_of_each_rank(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="csv", version="")
    dashboard = Dashboard(None, loggers=[logger])
    dashboard.write(10, TWO, {"progress/percent": 5.0})
    dashboard.write_page("diagnosis", 10, VERDICT, TWO)  # a table has no place for texts and figures
    dashboard.write_pictures(10, TWO)
    dashboard.close()
    logger.save()
    values = table(tmp_path / "csv" / "metrics.csv")[10]
    assert values["progress/percent"] == 5
    assert values["speed/step_ms_max"] == values["rank_001/speed/step_ms_max"] == 50
    assert values["rank_000/speed/step_ms_max"] == 13
    assert not list(tmp_path.rglob("events.*"))


def test_texts_and_figures_go_to_loggers_that_take_them(tmp_path: Path) -> None:
    class Album(CSVLogger):
        def __init__(self) -> None:
            super().__init__(tmp_path, name="csv", version="")
            self.texts: dict[str, str] = {}
            self.figures: dict[str, str] = {}

        def add_text(self, tag: str, text: str, step: int) -> None:
            self.texts[f"{tag} {step}"] = text

        def add_figure(self, tag: str, figure: Figure, step: int) -> None:
            self.figures[f"{tag} {step}"] = figure.axes[0].get_title()

    album = Album()
    dashboard = Dashboard(tmp_path / "board", loggers=[album])
    dashboard.write(10, TWO, {})
    dashboard.write_page("diagnosis", 11, VERDICT, TWO)
    dashboard.write_pictures(12, TWO)
    dashboard.close()
    assert album.texts == {"diagnosis 11": summary_page(VERDICT, TWO)}
    assert album.figures.keys() == {"ranks/parts 12", "ranks/busy 12"}
    assert (tmp_path / "board" / "all").is_dir()


def test_what_is_kept_is_found_again_by_the_run_alone(tmp_path: Path) -> None:
    assert kept(str(tmp_path), "wandb") == {}
    keep(str(tmp_path), "wandb", id="a1")
    keep(str(tmp_path), "mlflow", id="b2", folder="here")
    assert kept(str(tmp_path), "wandb") == {"id": "a1"}
    assert kept(str(tmp_path), "mlflow") == {"id": "b2", "folder": "here"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mlflow.json", "wandb.json"]
    assert title("/runs/outputs/digits_mlp/2026-01-01_12-00-00") == "digits_mlp/2026-01-01_12-00-00"


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_missing_package_of_a_logger_is_told_with_its_extra(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == package else find_spec(name, *more)
    )
    config: Any = OmegaConf.to_container(compose_config(f"logger=[tensorboard,{package}]"), resolve=True)
    with pytest.raises(UserError, match=rf'needs the package {package}, .*: type pip install "project\[{package}\]"'):
        preflight.check(config)


@pytest.mark.slow
def test_several_loggers_get_the_same_from_one_rank(run: Run) -> None:
    options = ("logger=[tensorboard,csv]", "trainer.max_epochs=2", "trainer.devices=2")
    folder, metrics = run(*QUIET, *options)
    steps = table(folder / "csv" / "metrics.csv")
    found = {key for values in steps.values() for key in values}
    assert found >= CURVES | {f"rank_{rank:03}/speed/samples_per_s" for rank in (0, 1)}
    assert steps[max(steps)]["test/accuracy"] == pytest.approx(metrics["test/accuracy"])
    losses = [values["train/loss"] for _, values in sorted(steps.items()) if "train/loss" in values]
    board = EventAccumulator(str(folder / "tensorboard")).Reload()
    assert losses == pytest.approx([point.value for point in board.Scalars("train/loss")])


@pytest.mark.slow
def test_table_of_a_run_that_goes_on_has_each_step_once(run_cli: Any, tmp_path: Path) -> None:
    first = run_cli("train", *QUIET, "logger=csv", "trainer.max_epochs=1", "scheduler=none", "paths.run_dir=run")
    assert first.returncode == 0, first.stderr
    again = run_cli("train", "resume=run", "trainer.max_epochs=2")
    assert again.returncode == 0, again.stderr
    with (tmp_path / "run" / "csv" / "metrics.csv").open(newline="") as lines:
        steps = [int(row["step"]) for row in csv.DictReader(lines) if row["train/loss"]]
    assert steps == [9, 19, 29]


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network, and no settings of the user."""
    for name, value in {
        "WANDB_MODE": "offline",
        "WANDB_SILENT": "true",
        "WANDB_CONFIG_DIR": str(tmp_path / "wandb-config"),
        "WANDB_CACHE_DIR": str(tmp_path / "wandb-cache"),
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


def run_and_go_on(run_cli: Any, logger: str) -> None:
    options = (*QUIET, f"logger={logger}", "trainer.max_epochs=1", "trainer.devices=2", "scheduler=none")
    first = run_cli("train", *options, "paths.run_dir=run")
    assert first.returncode == 0, first.stderr
    again = run_cli("train", "resume=run", "trainer.max_epochs=2")
    assert again.returncode == 0, again.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_mlflow_gets_what_tensorboard_gets(run_cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("mlflow")
    from mlflow.tracking import MlflowClient

    run_and_go_on(run_cli, "[tensorboard,mlflow]")
    client = MlflowClient(f"sqlite:///{tmp_path}/outputs/mlflow.db")
    (experiment,) = (found for found in client.search_experiments() if found.name == "digits_mlp")
    (found,) = client.search_runs([experiment.experiment_id])
    assert found.info.run_id == json.loads((tmp_path / "run" / "mlflow.json").read_text())["id"]
    assert found.info.status == "FINISHED"
    assert found.data.params["optimizer.lr"] == "0.003"
    assert found.data.metrics.keys() >= CURVES | {"rank_001/speed/samples_per_s"}
    assert [point.step for point in client.get_metric_history(found.info.run_id, "train/loss")] == [9, 19, 29]
    files = {str(path.relative_to(tmp_path)) for path in tmp_path.glob("outputs/mlflow/**/*.*")}
    names = {file.partition("/artifacts/")[2] for file in files}
    assert names >= {
        "config.yaml",
        "environment.json",
        "diagnosis.md",
        "test/confusion_matrix.png",
        "ranks/parts.png",
        "ranks/busy.png",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_mlflow_server_that_fails_costs_points_of_the_curves_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow")
    from project.tracking.mlflow import MLflowRun

    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    keep(str(tmp_path), "mlflow", id="a-run")
    logger = MLflowRun(str(tmp_path), "outputs", "digits", "http://127.0.0.1:9")  # where nobody listens
    for step in range(3):
        logger.log_metrics({"train/loss": 1.0}, step)
    with pytest.warns(UserWarning, match="MLflow fails, points are left out") as told:
        logger.finish_run()  # waits for what is logged in the background
    assert len(told) == 1


@pytest.mark.slow
@pytest.mark.usefixtures("offline")
def test_wandb_gets_what_tensorboard_gets(run_cli: Any, tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    run_and_go_on(run_cli, "[tensorboard,wandb]")
    parts = sorted((tmp_path / "run" / "wandb").glob("offline-run-*"))  # one for each time, of the same run
    known = json.loads((tmp_path / "run" / "wandb.json").read_text())["id"]
    assert [part.name.rpartition("-")[2] for part in parts] == [known, known]
    for part in parts:
        media = {path.name.rpartition("_")[0].rpartition("_")[0] for path in (part / "files" / "media").rglob("*.*")}
        assert media == {"diagnosis", "confusion_matrix", "parts", "busy"}
        (stored,) = part.glob("*.wandb")
        written = stored.read_bytes()  # records of Protocol Buffers, in which names stand as they are
        for name in CURVES | {"rank_001/speed/samples_per_s", "torch.optim.AdamW"}:
            assert name.encode() in written
