"""What tests share: the commands run as a user runs them, a real SLURM, and no process left behind."""

import contextlib
import fcntl
import itertools
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from multiprocessing.util import Finalize
from pathlib import Path
from typing import IO

import psutil
import pytest
from hydra.core.global_hydra import GlobalHydra

from composing import Compose, compose_config
from interpreters import WarmInterpreter, is_alive, start_fresh

SLURM_SCRIPT = Path(__file__).parent / "cluster" / "slurm.sh"

# A run inside a test must not take the test process, or the job it runs in, for its own cluster.
CLUSTER_VARIABLES = re.compile(
    r"(RANK|WORLD_SIZE|MASTER_.*|LOCAL_.*|GROUP_.*|ROLE_.*|NODE_RANK|TORCHELASTIC_.*|SLURM_.*|PL_.*|HYDRA_FULL_ERROR)$"
)

# Before torch is imported: the nets of tests are so small that a second thread only keeps the first one waiting.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# torch.compile in the test process would start a pool of compilers that lives as long as the session.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# What killed processes leave in the temporary folder goes with it when the session ends. Pytest's own folders, which
# are looked at after a failure, stay where they are.
TEMPORARY = None if "PYTEST_XDIST_WORKER" in os.environ else Path(tempfile.mkdtemp(prefix="tests-"))
if TEMPORARY is not None:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())
    os.environ["TMPDIR"] = tempfile.tempdir = str(TEMPORARY)
    # After multiprocessing's own folder, which lies in it and goes at -100.
    Finalize(None, shutil.rmtree, (TEMPORARY,), {"ignore_errors": True}, exitpriority=-200)

RunCli = Callable[..., "subprocess.CompletedProcess[str]"]
Run = Callable[..., tuple[Path, dict[str, float]]]


# Each takes a worker a minute or more: the first to begin, so that none is left alone at the end.
LONG = (
    "test_launchers", "test_combinations", "test_benchmark",
    "test_notebooks",  # example
    "test_train", "test_resume",
    "test_equivalence", "test_sharded", "test_faults", "test_numbers_across_ranks", "test_two_hosts", "test_slurm",
    "test_rename", "test_pipeline", "test_stopping", "test_weight_averaging",
    "test_without_examples",  # example
    "test_overhead", "test_readme",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """``-m "not slurm"`` leaves out all tests that use the fixture, marked or not."""
    for item in items:
        if "slurm" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.slurm)
    if "PYTEST_XDIST_WORKER" in os.environ:
        rank = {name: number for number, name in enumerate(LONG)}
        items.sort(key=lambda item: rank.get(item.path.stem, len(LONG)))


room: list[IO[str]] = []  # the lock that this worker holds, if any


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outside of the clock that ends a test
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Tests marked ``alone`` have the machine for themselves: other workers end theirs, and wait."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return (yield)
    is_alone = item.get_closest_marker("alone") is not None
    if not room:
        # Any two files can be locked, as these: nothing has to be made and removed. Through the gate one by one, or
        # those who share the room would never leave it empty.
        with Path(__file__).open() as gate:
            fcntl.flock(gate, fcntl.LOCK_EX)
            room.append(SLURM_SCRIPT.open())
            fcntl.flock(room[0], fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
    try:
        return (yield)
    finally:
        if not (is_alone and nextitem is not None and nextitem.get_closest_marker("alone")):
            room.pop().close()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu"):
        import torch  # only for tests that need it anyway

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")


known: set[psutil.Process] = set()  # of former tests too: while a process ends, Linux may leave others out of the list


@pytest.fixture(scope="session")
def compose() -> Iterator[Compose]:
    """``compose("optimizer=sgd", name="train")``: the config of a command with these overrides."""
    yield compose_config
    GlobalHydra.instance().clear()


@pytest.fixture(autouse=True)
def no_process_left_behind() -> Iterator[None]:
    """Fail a test whose child processes outlive it by more than a moment."""
    known.update(_children())
    yield
    left = _wait_for_end(lambda: _children() - known)
    if left:
        described = _describe(left)
        _kill(left)
        pytest.fail(f"left behind by this test: {described}", pytrace=False)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[WarmInterpreter]:
    started = WarmInterpreter()
    yield started
    started.close()


@pytest.fixture
def run_cli(tmp_path: Path, interpreter: WarmInterpreter) -> RunCli:
    """``run_cli("train", "trainer.devices=2")``: a command of the project, as from a shell in ``tmp_path``.

    ``timeout_s`` ends it with all its processes and fails the test; ``env`` adds variables; ``cwd`` replaces
    ``tmp_path``. Standard input is empty. Also fails if a process of the command outlives it.
    Variables that Python itself reads (``PYTHONPATH``) get the command a fresh interpreter, not a warm one.
    """

    def run(
        command: str,
        *args: str,
        timeout_s: float = 120,
        env: dict[str, str] | None = None,
        cwd: Path = tmp_path,
    ) -> subprocess.CompletedProcess[str]:
        argv = ["-m", f"project.{command}", *args]
        # SLURM_CONF says where the cluster is, not that this is a job of it.
        inherited = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not CLUSTER_VARIABLES.match(k)}
        start = start_fresh if any(name.startswith("PYTHON") for name in env or {}) else interpreter.start
        with tempfile.TemporaryDirectory(prefix="project-cli-") as output:
            stdout, stderr = Path(output, "stdout"), Path(output, "stderr")
            process = start(argv, cwd, inherited | (env or {}), stdout, stderr)
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                _kill(_family(process.pid))
                process.wait(5)
                said = f"{stdout.read_text()}\n{stderr.read_text()}"
                pytest.fail(f"no end after {timeout_s} s: {argv}\n{said}", pytrace=False)
            except BaseException:  # the test's own timeout, or Ctrl-C
                _kill(_family(process.pid))
                process.wait(5)
                raise
            left = _wait_for_end(lambda: _family(process.pid))
            if left:
                described = _describe(left)
                _kill(left)
                pytest.fail(f"outlived {argv}: {described}", pytrace=False)
            return subprocess.CompletedProcess(argv, process.returncode, stdout.read_text(), stderr.read_text())

    return run


@pytest.fixture
def slurm(slurm_cluster: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A running one-node SLURM that declares 8 CPUs: its configuration file, which ``SLURM_CONF`` names too.

    Its node takes jobs: of one that was killed SLURM cleans up for some seconds, and may take the node out for it.
    A requeued job waits two minutes, unless told ``scontrol update JobId=... StartTime=now``.
    """
    for name in [name for name in os.environ if name.startswith("SLURM_") and name != "SLURM_CONF"]:
        monkeypatch.delenv(name)  # or srun would look for the job that the tests run in
    end = time.monotonic() + 60
    while (state := _output("sinfo", "--noheader", "--format=%T")) != "idle" or not _takes_jobs():
        assert time.monotonic() < end, f"SLURM's node is {state}, and takes no job"
        if state.startswith(("drain", "down")):
            node = _output("sinfo", "--noheader", "--format=%N")
            subprocess.run(["scontrol", "update", f"nodename={node}", "state=resume"], check=False)
        time.sleep(0.5)
    return slurm_cluster


def _takes_jobs() -> bool:
    """Whether the scheduler knows of it, too: for a moment it may refuse a job that the idle node could run."""
    step = ["srun", "--ntasks", "2", "--overcommit", "--immediate=10", "true"]
    return subprocess.run(step, capture_output=True, stdin=subprocess.DEVNULL, check=False).returncode == 0


def _output(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


@pytest.fixture(scope="session")
def slurm_cluster() -> Iterator[Path]:
    if os.geteuid() != 0:
        pytest.skip("SLURM's daemons need root")
    if not (shutil.which("slurmctld") and shutil.which("munged")):
        pytest.skip("SLURM is not installed (Debian packages slurm-wlm and munge)")
    with pytest.MonkeyPatch.context() as patch:
        # Each of several pytest workers has a cluster of its own.
        worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
        folder = Path(f"/run/project-slurm-{worker}")
        patch.setenv("SLURM_TEST_DIR", str(folder))
        patch.setenv("SLURM_TEST_PORT", str(16817 + 2 * worker))
        subprocess.run([SLURM_SCRIPT, "stop"], check=True)  # of a session that was killed
        # To files, not pipes: the daemons inherit them.
        start = subprocess.run([SLURM_SCRIPT, "start", "8"], stdin=subprocess.DEVNULL, check=False)
        try:
            assert start.returncode == 0, "SLURM did not start; what slurm.sh said is above"
            patch.setenv("SLURM_CONF", str(folder / "slurm.conf"))
            yield folder / "slurm.conf"
        finally:
            subprocess.run([SLURM_SCRIPT, "stop"], check=True)


def _children() -> set[psutil.Process]:
    """All living descendants, but for the two helpers that multiprocessing keeps until Python ends."""
    helpers = {
        getattr(forkserver._forkserver, "_forkserver_pid", None),
        getattr(resource_tracker._resource_tracker, "_pid", None),
    }
    return {p for p in _descendants(os.getpid()) if p.pid not in helpers and is_alive(p)}


def _descendants(pid: int) -> set[psutil.Process]:
    """As psutil finds them by reading about every process: a tenth of its time, which every test takes twice."""
    found: set[psutil.Process] = set()
    if not Path(f"/proc/self/task/{os.getpid()}/children").exists():  # no Linux, or one without the lists
        found.update(psutil.Process(pid).children(recursive=True))
        return found
    with contextlib.suppress(OSError):  # it, or the thread that started the child, has ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                with contextlib.suppress(psutil.NoSuchProcess):
                    found.add(psutil.Process(child))
                found |= _descendants(child)
    return found


def _family(session_id: int) -> set[psutil.Process]:
    """The living processes of a session, and the descendants of its leader that left it."""
    family = set()
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == session_id:
                family.add(process)
    with contextlib.suppress(psutil.NoSuchProcess):
        family.update(psutil.Process(session_id).children(recursive=True))
    return {p for p in family if is_alive(p)}


def _wait_for_end(living: Callable[[], set[psutil.Process]], grace_s: float = 5) -> set[psutil.Process]:
    end = time.monotonic() + grace_s
    while (left := living()) and time.monotonic() < end:
        time.sleep(0.05)
    return left


def _describe(processes: set[psutil.Process]) -> str:
    lines = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            lines.append(f"{process.pid} ({process.status()}): {' '.join(process.cmdline())[:200]}")
    return "; ".join(lines)


def _kill(processes: set[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.send_signal(signal.SIGKILL)
    psutil.wait_procs(processes, timeout=5)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """``run("trainer/strategy=ddp", "trainer.devices=2")`` trains in this process: the run folder and its metrics.

    Cheaper than ``run_cli``, since ranks are copies of a server that has imported everything. Runs of equal
    arguments are shared by all tests of a session. ``command`` and ``config`` name another command and its config.
    """
    from hydra import compose, initialize_config_dir

    from project.config.composition import config_folder, register_resolvers
    from project.launch.job import run_job

    outputs = tmp_path_factory.mktemp("outputs")
    numbers = itertools.count()
    done: dict[tuple[str, ...], tuple[Path, dict[str, float]]] = {}
    register_resolvers()

    def run(*overrides: str, command: str = "train", config: str | None = None) -> tuple[Path, dict[str, float]]:
        key = (command, *overrides)
        if key not in done:
            folder = outputs / str(next(numbers))
            with initialize_config_dir(str(config_folder()), version_base="1.3"):
                composed = compose(config or command, [f"paths.run_dir={folder}", *overrides])
            outcome = run_job(f"project.{command}:{command}", composed, list(overrides), command)
            done[key] = folder, outcome.metrics
        return done[key]

    return run
