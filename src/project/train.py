"""Train a model, test its best weights and say what came of it.

python -m project.train model/net=residual_cnn optimizer.lr=0.002
python -m project.train trainer.devices=4 trainer/strategy=fsdp
python -m project.train resume=outputs/digits_mlp/2026-01-01_12-00-00
"""

from typing import Any

from project.config.secrets import masked
from project.launch.cli import command
from project.launch.resume import compose_resumed, continue_curves, resume_point
from project.launch.run import Outcome, Run


def train(config: dict[str, Any], run: Run) -> Outcome:
    """What each rank does; ``config`` is the composed config as plain data."""
    # Lightning takes seconds to import and is not needed to print a config, so it is imported here.
    import lightning as L

    from project.config.build import build, build_all
    from project.data.sharing import share
    from project.launch.full_disk import spare_curves
    from project.launch.run_folder import write_metrics
    from project.strategies.sharded_checkpoint import consolidate_all
    from project.sweep.pruning import was_pruned
    from project.tracking.hparams import select_hparams
    from project.training.capabilities import batch_noted, untestable
    from project.training.checkpoint import best_checkpoint, loading
    from project.training.ending import ended_early
    from project.training.outcome import outcome_of
    from project.training.rank_states import RankStates
    from project.training.trainer import build_trainer

    start = resume_point(run, config)

    # Every rank builds the same weights; RankStates gives each its own random numbers once training starts.
    L.seed_everything(config["seed"], workers=True, verbose=False)
    datamodule = build(config, "data")
    share(datamodule, config["seed"])

    spare_curves()  # a full disk must not end the run
    loggers = build_all(config, "logger")
    if run.resumes:
        continue_curves(loggers, start, run.rank)
    states = RankStates(config["seed"])
    trainer = build_trainer(config, run, states, loggers)
    with trainer.precision_plugin.module_init_context():  # 64-true weights are float64 from the start
        model = build(config, "model")
    for logger in loggers:
        if hasattr(logger, "start_run"):
            logger.start_run(masked(config), run.environment, select_hparams(masked(config), run.overrides))

    with batch_noted(model, config), loading(start.path):
        trainer.fit(model, datamodule=datamodule, ckpt_path=start.path, weights_only=True)
    why = ended_early(trainer)  # before the test takes the callbacks back to the best checkpoint
    metrics = states.logged | {name: float(value) for name, value in trainer.callback_metrics.items()}
    consolidate_all(trainer)  # one plain file of each checkpoint that the ranks wrote in parts
    best = best_checkpoint(trainer)

    if (lacks := untestable(model, datamodule)) and config["test"] and run.rank == 0:
        print(f"Not tested, because {lacks}: define it, or type test=false")
    if config["test"] and not lacks and not was_pruned(trainer):
        # Without a checkpoint (callbacks=none) the weights in memory are the ones to test.
        trainer.test(
            model, datamodule=datamodule, ckpt_path=best.path if best else None, verbose=False, weights_only=True
        )
        metrics |= {name: float(value) for name, value in trainer.callback_metrics.items()}

    for logger in loggers:
        if hasattr(logger, "finish_run"):
            logger.finish_run()
    outcome = outcome_of(trainer, metrics, best, config["monitor"], run, why)
    if trainer.is_global_zero:
        write_metrics(run.folder, outcome)
    return outcome


main = command("train", train, prepare=compose_resumed)

if __name__ == "__main__":
    main()
