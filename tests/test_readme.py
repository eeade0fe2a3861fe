"""Every command that the README shows works: it is run, if need be on less data, or read as far as it goes here."""

import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from omegaconf import DictConfig, OmegaConf
from PIL import Image

from comparison import Run
from composing import compose_config
from project.config import preflight
from project.config.composition import config_folder
from project.errors import UserError
from project.sweep.plugins import register_plugins
from project.sweep.space import space_of
from readme_commands import FENCE, README, Shown, commands, overrides, python_files
from sweep.folders import make_sweep, write_run

pytestmark = pytest.mark.slow

ROOT = README.parent
PACKAGE = preflight.__name__.partition(".")[0]
OURS = rf"(python -m {PACKAGE}\.|{PACKAGE.replace('_', '-')}-)"
TEXT = README.read_text()
QUIET = ("trainer.enable_progress_bar=false", "trainer.enable_model_summary=false")
SHORT = ("debug=fast", *QUIET)
# What stands for the user's own code, where the README shows none.
OWN = """
import lightning, torch
from torch import nn

class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    def forward(self, images): return self.net(nn.functional.adaptive_avg_pool2d(images.mean(dim=1), 8))
    def loss(self, batch): return nn.functional.cross_entropy(self(batch["image"]), batch["label"])
    def training_step(self, batch, index): return self.loss(batch)
    def validation_step(self, batch, index): self.log("val_loss", self.loss(batch), sync_dist=True)
    def test_step(self, batch, index): self.log("test_loss", self.loss(batch), sync_dist=True)
    def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)

class Net(nn.Sequential):
    def __init__(self, image_shape, num_classes):
        super().__init__(nn.Flatten(), nn.Linear(image_shape[1] * image_shape[2], num_classes))
"""
TENSORS = "torch.rand(1000, 3, 64, 64), torch.randint(2, (1000,))"


@dataclass(frozen=True)
class Kit:
    """What a command is run with."""

    run: Run
    run_cli: Any
    folder: Path

    def cli(self, words: list[str], *more: str) -> "subprocess.CompletedProcess[str]":
        """Run ``python -m project.COMMAND ...``, or the command's script, in the folder; it must succeed."""
        result = self.run_cli(command_of(words), *arguments_of(words), *more, cwd=self.folder)
        assert result.returncode == 0, result.stderr
        completed: subprocess.CompletedProcess[str] = result
        return completed


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, run: Run) -> Path:
    """Where the commands are typed: a run, a sweep and the user's own code are there."""
    folder = tmp_path_factory.mktemp("readme")
    shutil.copytree(run(*SHORT)[0], folder / "run")
    sweep = make_sweep(folder / "outputs" / "mlp" / "sweep", {"lr": "0.1"}, {"lr": "0.01"}, experiment="digits_mlp")
    for job, value in zip(sweep.jobs, (0.8, 0.9), strict=True):
        lr = f"optimizer.lr={job.parameters['lr']}"
        write_run(job.folder, metrics={"test/f1": value}, objective=value, overrides=[lr], config={"mode": "max"})
        (job.folder / "tensorboard").mkdir()
    for number in range(40):
        pixels = np.random.default_rng(number).integers(256, size=(24, 24, 3), dtype=np.uint8)
        path = folder / "pictures" / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    rows = [f"{20 + number},{number % 7},{'house' if number % 2 else 'flat'},{number * 1.5}" for number in range(200)]
    (folder / "houses.csv").write_text("\n".join(["area,rooms,kind,price", *rows]))
    files = {"mine.py": ""} | python_files(TEXT)
    for name, code in files.items():
        own = OWN if name == "mine.py" and "class Model" not in code else ""
        (folder / name).write_text(code.replace("= ...", f"= {TENSORS}") + own)
    return folder


@pytest.fixture
def kit(run: Run, run_cli: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Kit:
    monkeypatch.syspath_prepend(folder)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("WANDB_MODE", "offline")  # there is no account
    return Kit(run, run_cli, folder)


def command_of(words: list[str]) -> str:
    """``train`` of ``python -m project.train ...`` and of ``project-train ...``."""
    return words[2].rpartition(".")[2] if words[1:2] == ["-m"] else words[0].rpartition("-")[2]


def arguments_of(words: list[str]) -> list[str]:
    return words[3:] if words[1:2] == ["-m"] else words[1:]


def trains(kit: Kit, shown: Shown) -> None:
    arguments = arguments_of(shown.words)
    if shown.output:
        result = kit.run_cli("train", *arguments, cwd=kit.folder)
        assert (result.stdout + result.stderr).strip() == shown.output
    elif {"--help", "--cfg"} & set(arguments):
        assert kit.cli(shown.words).stdout
    elif any(text == "-m" or text.startswith("sweep=") for text in arguments):
        composes(kit, shown)  # what its jobs do is what one run does; tests/test_launchers.py runs sweeps
    elif any(text.startswith("resume=") for text in arguments):
        if "trainer.max_epochs" not in shown.text:  # else it goes on from its end, to train longer
            (kit.folder / "run" / "metrics.json").unlink(missing_ok=True)
        assert re.search("Going on after step|All 2 jobs of the sweep are finished", kit.cli(shown.words).stdout)
    elif any(text.endswith("best.yaml") for text in arguments):
        kit.cli(["python", "-m", "project.runs", "report", "outputs/mlp/sweep"])
        kit.cli(shown.words, *SHORT)
    elif can_run(arguments) and "wandb" in shown.text:
        kit.cli(shown.words, *SHORT)  # its service lives as long as the process that started it
    elif can_run(arguments):
        assert kit.run(*arguments, *SHORT)[1]
    else:
        composes(kit, shown)


def can_run(arguments: list[str]) -> bool:
    """Whether a training needs nothing that this machine may lack: GPUs, packages of extras, downloads."""
    text = " ".join(arguments)
    needs = {
        "finetune": "torchvision",
        "timm": "timm",
        "wandb": "wandb",
        "mlflow": "mlflow",
        "parquet": "pyarrow",
        "quantize": "torchao",
    }
    missing = [word for word, package in needs.items() if importlib.util.find_spec(package) is None and word in text]
    return not missing and not re.search(r"deepspeed|mnist|cifar|finetune|=(-1|8|auto|cuda)$|bf16", text)


def starts_from_checkpoint(kit: Kit, shown: Shown) -> None:
    assert kit.cli(shown.words, *([] if "--help" in shown.text else ["trainer.enable_progress_bar=false"])).stdout


def composes(kit: Kit, shown: Shown) -> None:
    words = shown.words
    if words[0] in ("torchrun", "srun"):
        words = ["python", *words[words.index("-m") :]]
    check_config(command_of(words), arguments_of(words))


def check_config(command: str, arguments: list[str]) -> None:
    """Compose a command's config, and check its values and names."""
    config: Any = OmegaConf.to_container(composed(command, arguments), resolve=True)
    try:
        preflight.check(config)
    except UserError as error:
        if "which is not installed: type pip install" not in str(error):  # an extra, that tests do without
            raise


def composed(command: str, arguments: list[str]) -> DictConfig:
    """The config of a command, with the first of the values that a sweep tries."""
    register_plugins()
    return compose_config(*(single_value(text) for text in arguments if text != "-m"), name=command)


def single_value(text: str) -> str:
    override: Override = OverridesParser.create().parse_override(text)
    if not override.is_sweep_override():
        return text
    space_of([override])  # Optuna can search it
    values = override.value()
    first = values.start if isinstance(values, IntervalSweep) else next(iter(override.sweep_string_iterator()))
    prefix = "+" if text.startswith("+") else ""
    return f"{prefix}{override.key_or_group}={first}"


def lists_runs(kit: Kit, shown: Shown) -> None:
    if " tensorboard " in shown.text:  # would serve until it is ended; tests/test_runs.py has what it does before
        from project.runs import parser

        assert parser().parse_args(arguments_of(shown.words)).runs
    else:
        assert kit.cli(shown.words).stdout


def looks_at_machine(kit: Kit, shown: Shown) -> None:
    result = kit.run_cli("doctor", *arguments_of(shown.words), "--no-speed", cwd=kit.folder)
    assert "torch" in result.stdout
    assert result.returncode in (0, 1)  # as this machine is


def renames(kit: Kit, shown: Shown) -> None:
    name, *target = arguments_of(shown.words)
    # examples
    if "--without-examples" in target:  # tests/test_without_examples.py makes such a copy, and runs its tests
        assert "--without-examples" in kit.cli([*shown.words[:3], "--help"]).stdout
        return
    # /examples
    name += "_two" if name == PACKAGE else ""  # of a project that was renamed so already
    if not target:  # in place: tests/test_rename.py does that, in a copy
        assert name.isidentifier()
    else:
        result = kit.run_cli("rename", name, "../renamed", cwd=kit.folder / "outputs")
        assert result.returncode == 0, result.stderr
        assert (kit.folder / "renamed" / "src" / name / "train.py").exists()


def has_markers(kit: Kit, shown: Shown) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    markers = [marker.partition(":")[0] for marker in options["markers"]]
    expression = shown.words[shown.words.index("-m", 2) + 1] if "-m" in shown.words[2:] else ""
    assert set(re.findall(r"\w+", expression)) - {"not", "and", "or"} <= set(markers)


def has_script(kit: Kit, shown: Shown) -> None:
    script = (ROOT / shown.words[1]).read_text()
    assert all(f'"{word}"' in script for word in shown.words[2:] if word.startswith("--"))


def makes(kit: Kit, shown: Shown) -> None:
    subprocess.run([*shown.words, "--dry-run"], cwd=ROOT, check=True, stdout=subprocess.DEVNULL, timeout=30)


def makes_environment(kit: Kit, shown: Shown) -> None:
    first, _, then = shown.text.partition(" && . ")
    subprocess.run([*Shown(first).words, "--without-pip"], cwd=kit.folder, check=True, timeout=30)
    assert (kit.folder / then).is_file()


def installs(kit: Kit, shown: Shown) -> None:
    extras = re.findall(r"\[(\S+)\]", shown.text)
    names = {name for found in extras for name in found.split(",")}
    assert names <= set(extras_of_project())
    packages = [re.split(r"[^\w-]", text)[0] for text in importlib.metadata.requires(PACKAGE) or []]
    assert names or [word for word in shown.words[2:] if word in packages]


def shows_board(kit: Kit, shown: Shown) -> None:
    from tensorboard.plugins.core.core_plugin import CorePluginLoader
    from tensorboard.program import TensorBoard

    board = TensorBoard([CorePluginLoader])
    board.configure(["tensorboard", *shown.words[1:]])
    assert board.flags.logdir


def starts_ranks(kit: Kit, shown: Shown) -> None:
    from torch.distributed.run import get_args_parser

    get_args_parser().parse_args(shown.words[1:] if "project.train" in shown.text else [*shown.words[1:], "script"])
    if "project.train" in shown.text:
        composes(kit, shown)


def is_executable(kit: Kit, shown: Shown) -> None:
    assert os.access(ROOT / shown.words[0], os.X_OK)


def of_extra(kit: Kit, shown: Shown) -> None:
    assert shown.words[0] in extras_of_project()


def extras_of_project() -> list[str]:
    return importlib.metadata.metadata(PACKAGE).get_all("Provides-Extra") or []


Check = Callable[[Kit, Shown], None]
RULES: tuple[tuple[str, Check], ...] = (
    (rf"{OURS}train\b", trains),
    (rf"{OURS}(evaluate|predict)\b", starts_from_checkpoint),
    (rf"{OURS}benchmark\b", composes),  # tests/test_benchmark.py runs it
    (rf"{OURS}runs\b", lists_runs),
    (rf"{OURS}doctor\b", looks_at_machine),
    (rf"{OURS}rename\b", renames),
    (r"python -m pytest\b", has_markers),
    (r"python tests/", has_script),
    (r"python3? -m venv\b", makes_environment),
    (r"pip install\b", installs),
    (r"make\b", makes),
    (r"tensorboard\b", shows_board),
    (r"torchrun\b", starts_ranks),
    (r"srun\b.* python -m ", composes),
    (r"\.ci/run$", is_executable),
    (r"(mlflow|wandb)\b", of_extra),
)


@pytest.mark.parametrize("shown", commands(TEXT), ids=lambda shown: shown.text)
def test_command_of_the_readme_works(kit: Kit, shown: Shown) -> None:
    check = next((check for pattern, check in RULES if re.match(pattern, shown.text)), None)
    assert check is not None, f"no rule covers {shown.text}: add one to RULES"
    filled = re.sub(r"<run folder>|<run>|outputs/\w+/\d{4}-[\d_-]+", "run", shown.text)
    filled = filled.replace("<sweep>", "outputs/mlp/sweep").replace("<that index>", "https://example.org/cpu")
    filled = re.sub(r"<[\w ]+>", "1", filled)
    check(kit, replace(shown, text=filled))


def choices(group: str) -> list[tuple[str, str]]:
    return [("train", f"{group}={path.stem}") for path in sorted((config_folder() / group).glob("*.yaml"))]


# What an override may need beside it; the first context in which it composes will do.
CONTEXTS: dict[str, list[tuple[str, ...]]] = {
    "benchmark.": [("benchmark", choice) for _, choice in choices("benchmark")],
    "callbacks.": choices("callbacks"),
    "data": [*choices("experiment"), *choices("data")],
    "format=": [("predict", "ckpt_path=x")],
    "quantize=": [("predict", "ckpt_path=x")],
    "+hydra.launcher": choices("hydra/launcher"),
    "model": [*choices("experiment"), *choices("model/net")],
    "sweep": [("train", "sweep=optuna")],
    "trainer.strategy.": choices("trainer/strategy"),
}
NO_OVERRIDES = r"[A-Z_]+=|active=|data=faces|.*\bresume=|.*logger=.*(wandb|mlflow)|.*=(jobs|NAME)$"


@pytest.mark.parametrize("text", [text for text in overrides(TEXT) if not re.match(NO_OVERRIDES, text)])
def test_override_of_the_readme_composes(text: str) -> None:
    words = Shown(text).words
    contexts = [context for key, some in CONTEXTS.items() if words[0].startswith(key) for context in some]
    errors = []
    for command, *context in [("train",), *contexts]:
        try:
            composed(command, [*context, *words])
            return
        except Exception as error:
            errors.append(error)
    raise errors[0]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("Type\n\n    python -m project.train  # it\n\nor `make test`.", ["python -m project.train", "make test"]),
        ("```bash\npython -m project.train \\\n  a=1\n```\n", ["python -m project.train a=1"]),
        ("```python\npython = 1\n```\n\n    outputs/x\n      y.yaml   of python\n", []),
        ("Files:\n\n    ls -l\n", ["ls -l"]),
    ],
)
def test_commands_are_found(text: str, found: list[str]) -> None:
    assert [shown.text for shown in commands(text)] == found


def test_readme_has_commands_of_each_kind() -> None:
    shown = [shown.text for shown in commands(TEXT)]
    for pattern, _ in RULES[:4]:
        assert any(re.match(pattern, text) for text in shown)
    assert len(shown) > 30


def test_sentences_of_the_readme_fit_into_120_columns() -> None:
    lines = re.sub(rf"(?ms)^{FENCE}.*?^{FENCE}", "", TEXT.replace(PACKAGE, "package")).splitlines()  # whatever its name
    assert [line for line in lines if len(line) > 120 and not line.startswith(("|", "!", "    "))] == []
