"""Write a checkpoint's predictions: one row per sample, in the order of the data.

python -m project.predict ckpt_path=outputs/digits_mlp/2026-01-01_12-00-00/checkpoints/best.ckpt
python -m project.predict ckpt_path=<run folder>/checkpoints/best.ckpt split=val trainer.devices=2
python -m project.predict ckpt_path=<run folder>/checkpoints/best.ckpt format=parquet
"""

from typing import Any

from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError
from project.launch.cli import command
from project.launch.run import Outcome, Run


def predict(config: dict[str, Any], run: Run) -> Outcome:
    """What each rank does; ``config`` is the checkpoint's, with what was typed on top."""
    import lightning as L

    from project.compression.quantization import quantization
    from project.config.build import build
    from project.data.sharing import share
    from project.launch.rank import cluster_environment
    from project.launch.run_folder import write_metrics
    from project.training.capabilities import batch_noted, forward_explained, unpredicting
    from project.training.checkpoint import loading
    from project.training.predictions import PredictionWriter
    from project.training.progress_display import shows_bar

    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build(config, "data")
    if hasattr(datamodule, "predict_split"):
        datamodule.predict_split = config["split"]
    elif type(datamodule).predict_dataloader is L.LightningDataModule.predict_dataloader:
        raise UserError(f"{type(datamodule).__name__} has no predict_dataloader: add one that does not shuffle")
    elif typed := [text for text in run.overrides if text.startswith("split=")]:
        own = type(datamodule).__name__
        raise UserError(f"{typed[-1]} was typed, and {own}.predict_dataloader decides what is predicted: leave it out")
    share(datamodule, config["seed"])
    writer = PredictionWriter(run.folder / f"predictions.{config['format']}")
    trainer: L.Trainer = build(
        config, "trainer", default_root_dir=run.folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=shows_bar(config),
        plugins=cluster_environment(), callbacks=[*quantization(config["quantize"]), writer],
    )  # fmt: skip
    with trainer.precision_plugin.module_init_context():
        model = build(config, "model")

    if lacks := unpredicting(model):
        raise UserError(f"{lacks}: define one of them")
    with forward_explained(model), batch_noted(model, config), loading(config["ckpt_path"]):
        trainer.predict(
            model, datamodule=datamodule, ckpt_path=config["ckpt_path"], return_predictions=False, weights_only=True
        )

    files = {"predictions": str(writer.path)}
    samples = {"samples": float(writer.num_rows)}
    outcome = Outcome(samples, folder=str(run.folder), files=files, world_size=trainer.world_size)
    if trainer.is_global_zero:
        write_metrics(run.folder, outcome)
    return outcome


main = command("predict", predict, prepare=compose_from_checkpoint)

if __name__ == "__main__":
    main()
