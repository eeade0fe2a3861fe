"""The training command as it would be with Lightning's own launcher, which starts ranks by repeating the command.

python -m project.benchmarking.lightning_launcher [key=value ...]
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from omegaconf import OmegaConf


def main() -> None:
    from hydra import compose, initialize_config_dir

    from project.config.composition import config_folder, register_resolvers
    from project.launch.run import Run

    register_resolvers()
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("train", sys.argv[1:])
    run = Run(Path(config.paths.run_dir), sys.argv[1:], {}, time.time())

    from project.train import train

    train(OmegaConf.to_container(config, resolve=True), run)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
