"""The built wheel works without the repository."""

import os
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
COMMANDS = ("train", "evaluate", "predict", "benchmark")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source distribution and the wheel that was built from it, not from the repository."""
    folder = tmp_path_factory.mktemp("dist")
    # Without isolation: the backend is installed already, so the build needs no network.
    subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT],
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    (path,) = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.fixture
def installed(wheel: zipfile.ZipFile, tmp_path: Path) -> Path:
    """The wheel unpacked, as an installer would do it."""
    folder = tmp_path / "site-packages"
    wheel.extractall(folder)
    return folder


def run_python(installed: Path, *args: str) -> subprocess.CompletedProcess[str]:
    # PYTHONPATH comes before the editable install of the environment that runs the tests.
    return subprocess.run(
        [sys.executable, *args],
        cwd=installed.parent,
        env=os.environ | {"PYTHONPATH": str(installed)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_wheel_carries_every_config(wheel: zipfile.ZipFile) -> None:
    configs = {f"project/{path.relative_to(ROOT)}" for path in (ROOT / "conf").rglob("*.yaml")}
    assert "project/conf/train.yaml" in configs
    assert configs <= set(wheel.namelist())


def test_wheel_installs_no_other_top_level_name(wheel: zipfile.ZipFile) -> None:
    tops = {name.split("/")[0] for name in wheel.namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"project"}


@pytest.mark.parametrize(
    ("package", "taken", "refused"), [("hydra-core", "1.3.2", "1.4.0rc3"), ("omegaconf", "2.3.0", "2.4.0.dev3")]
)
def test_wheel_takes_no_hydra_that_its_plugins_can_not_work_with(
    wheel: zipfile.ZipFile, package: str, taken: str, refused: str
) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/METADATA"))
    lines = wheel.read(name).decode().split("\n\n")[0].splitlines()
    requirements = [Requirement(line.partition(": ")[2]) for line in lines if line.startswith("Requires-Dist: ")]
    (found,) = (requirement for requirement in requirements if requirement.name == package)
    assert found.specifier.contains(taken)
    assert not found.specifier.contains(refused, prereleases=True)
    assert "hydra-optuna-sweeper" not in {requirement.name for requirement in requirements}  # it brings hydra-core 1.4


def test_wheel_declares_the_console_scripts(wheel: zipfile.ZipFile) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    parser = ConfigParser()
    parser.read_string(wheel.read(name).decode())
    assert dict(parser["console_scripts"]) == {
        f"project-{c}": f"project.{c}:main" for c in (*COMMANDS, "runs", "doctor", "rename")
    }


def test_source_distribution_carries_what_a_build_and_the_tests_need(built: Path) -> None:
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names >= {"conf/train.yaml", "src/project/train.py", "tests/conftest.py", "pyproject.toml"}


@pytest.mark.parametrize("command", COMMANDS)
def test_installed_command_composes_the_configs_of_the_wheel(installed: Path, command: str) -> None:
    # The wheel's own copy is marked, so that a config found anywhere else shows.
    config = installed / "project" / "conf" / f"{command}.yaml"
    config.write_text(config.read_text() + "\nfrom_the_wheel: true\n")
    result = run_python(installed, "-m", f"project.{command}", "--cfg", "job")
    assert result.returncode == 0, result.stderr
    assert "from_the_wheel: true" in result.stdout
