"""Train a model, test its best weights and say what came of it.

python -m project.train trainer.devices=4
"""

from typing import Any

from project.launch.cli import command
from project.launch.run import Outcome, Run


def train(config: dict[str, Any], run: Run) -> Outcome:
    """What each rank does; ``config`` is the composed config as plain data."""
    # Lightning takes seconds to import and is not needed to print a config, so it is imported here.
    import lightning as L

    from project.data.sharing import share
    from project.launch.build import build, build_all
    from project.launch.checkpoint import ConfigInCheckpoint, best_checkpoint
    from project.launch.final_validation import FinalValidation
    from project.launch.last_window import LastWindow
    from project.launch.monitor import MonitorCheck
    from project.launch.rank import cluster_environment
    from project.launch.run_folder import write_metrics
    from project.launch.seeding import RankSeeds
    from project.strategies.sharded_checkpoint import consolidate_all
    from project.tracking.hparams import select_hparams

    # Every rank builds the same weights; RankSeeds gives each its own random numbers once training starts.
    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build(config, "data")
    share(datamodule, config["seed"])

    loggers = build_all(config, "logger")
    trainer: L.Trainer = build(
        config,
        "trainer",
        default_root_dir=run.folder,
        callbacks=[
            MonitorCheck(config["monitor"]),
            RankSeeds(config["seed"]),
            FinalValidation(),
            LastWindow(),
            *build_all(config, "callbacks"),
            ConfigInCheckpoint(config),
        ],
        logger=loggers,
        plugins=cluster_environment(),
    )
    with trainer.precision_plugin.module_init_context():  # 64-true weights are float64 from the start
        model = build(config, "model")
    for logger in loggers:
        if hasattr(logger, "start_run"):
            logger.start_run(config, run.environment, select_hparams(config, run.overrides))

    trainer.fit(model, datamodule=datamodule)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    consolidate_all(trainer)  # one plain file of each checkpoint that the ranks wrote in parts
    best = best_checkpoint(trainer)

    if config["test"]:
        # Without a checkpoint (callbacks=none) the weights in memory are the ones to test.
        trainer.test(model, datamodule=datamodule, ckpt_path=best.path if best else None, verbose=False)
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}

    for logger in loggers:
        if hasattr(logger, "finish_run"):
            logger.finish_run()
    outcome = Outcome.of_training(trainer, metrics, best, config["monitor"], run)
    if trainer.is_global_zero:
        write_metrics(run.folder, outcome)
    return outcome


main = command("train", train)

if __name__ == "__main__":
    main()
