"""Evaluate a checkpoint on its run's validation or test data.

python -m project.evaluate ckpt_path=outputs/digits_mlp/2026-01-01_12-00-00/checkpoints/best.ckpt
python -m project.evaluate ckpt_path=<run folder>/checkpoints/best.ckpt split=val trainer.devices=2
python -m project.evaluate ckpt_path=<run folder>/checkpoints/last.ckpt data.batch_size=16
"""

from typing import Any

from project.config.from_checkpoint import compose_from_checkpoint
from project.errors import UserError
from project.launch.cli import command
from project.launch.run import Outcome, Run


def evaluate(config: dict[str, Any], run: Run) -> Outcome:
    """What each rank does; ``config`` is the checkpoint's, with what was typed on top."""
    import lightning as L

    from project.compression.quantization import quantization
    from project.config.build import build
    from project.data.sharing import share
    from project.launch.rank import cluster_environment
    from project.launch.run_folder import write_metrics
    from project.training.capabilities import untestable
    from project.training.checkpoint import loading
    from project.training.loops import install_evaluation
    from project.training.progress_display import shows_bar

    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build(config, "data")
    share(datamodule, config["seed"])
    trainer: L.Trainer = build(
        config, "trainer", default_root_dir=run.folder, logger=False, enable_checkpointing=False,
        enable_progress_bar=shows_bar(config),
        plugins=cluster_environment(), callbacks=quantization(config["quantize"]),
    )  # fmt: skip
    install_evaluation(trainer)
    with trainer.precision_plugin.module_init_context():
        model = build(config, "model")

    if config["split"] == "test" and (lacks := untestable(model, datamodule)):
        raise UserError(f"{lacks}: define it, or type split=val")
    run_split = trainer.validate if config["split"] == "val" else trainer.test
    with loading(config["ckpt_path"]):
        run_split(model, datamodule=datamodule, ckpt_path=config["ckpt_path"], verbose=False, weights_only=True)

    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    outcome = Outcome(metrics, folder=str(run.folder), checkpoint=config["ckpt_path"], world_size=trainer.world_size)
    if trainer.is_global_zero:
        write_metrics(run.folder, outcome)
    return outcome


main = command("evaluate", evaluate, prepare=compose_from_checkpoint)

if __name__ == "__main__":
    main()
