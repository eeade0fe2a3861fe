"""One model, as it was trained or quantized: how good it is, how fast and how large.

python -m project.benchmarking.compressed REPORT.json CHECKPOINT SETTINGS.json
"""

from __future__ import annotations

import io
import json
import statistics
import sys
import traceback
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from project.benchmarking.measure import Contender
from project.benchmarking.trial_report import latencies_ms
from project.compression.quantization import Quantization
from project.config.build import build
from project.data.sharing import share
from project.errors import sentence
from project.training.checkpoint import read_config

MODULE = "project.benchmarking.compressed"


@dataclass(frozen=True)
class Settings:
    """What is measured.

    Attributes:
        kind: How the model is quantized; None leaves it as it was trained.
        batch_sizes: Of the forward passes whose latency is measured.
        calls: Measured forward passes of each size.
    """

    kind: str | None
    batch_sizes: list[int] = field(default_factory=list)
    calls: int = 50


def contender(name: str, checkpoint: Path, settings: Settings) -> Contender:
    """The model of a checkpoint, as a process; its report has metrics, latencies and sizes."""
    typed = [text.replace("{", "{{").replace("}", "}}") for text in (str(checkpoint), json.dumps(asdict(settings)))]
    return Contender(name, ["-m", MODULE, "{report}", *typed], lambda measured: measured.wall_s, threads=None)


class Latency(Callback):
    """Measures ``predict_step`` on one of the batches of a test, after the test."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.p50_ms: dict[int, float] = {}
        self._batch: Any = None

    def on_test_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, *_: Any
    ) -> None:
        if self._batch is None:
            self._batch = batch

    def on_test_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        for size in self.settings.batch_sizes:
            times = latencies_ms(trainer, pl_module, self._batch, size, self.settings.calls)
            self.p50_ms[size] = statistics.median(times)


def measure_model(checkpoint: Path, settings: Settings) -> dict[str, Any]:
    """Test the model of a checkpoint, and measure it, on one device."""
    config = read_config(checkpoint)
    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build(config, "data")
    share(datamodule, config["seed"])
    latency = Latency(settings)
    trainer = L.Trainer(
        accelerator=config["trainer"]["accelerator"], devices=1, precision=config["trainer"]["precision"],
        callbacks=[*([Quantization(settings.kind)] if settings.kind else []), latency], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        use_distributed_sampler=False,
    )  # fmt: skip
    with trainer.precision_plugin.module_init_context():
        model = build(config, "model")
    trainer.test(model, datamodule=datamodule, ckpt_path=checkpoint, verbose=False, weights_only=True)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"metrics": metrics, "latency_ms": latency.p50_ms} | sizes(model)


def sizes(module: nn.Module) -> dict[str, int]:
    """Bytes of the file of a module's weights, and of that file compressed."""
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return {"bytes": file.getbuffer().nbytes, "compressed_bytes": len(zlib.compress(file.getbuffer()))}


if __name__ == "__main__":
    try:
        report_path, checkpoint_path, settings_text = sys.argv[1:]
        report = measure_model(Path(checkpoint_path), Settings(**json.loads(settings_text)))
        Path(report_path).write_text(json.dumps(report))
    except Exception as error:
        text = sentence(error)
        if text is None:
            traceback.print_exc()
        sys.exit(f"error: {text or error}")
