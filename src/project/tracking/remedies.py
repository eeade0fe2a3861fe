"""What to type against what bounds a run: overrides that this run does not have yet and that its devices can use."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Facts:
    """What the rules must know of a run besides its times.

    Attributes:
        num_workers: Of the training loader; so for ``prefetch_factor`` and ``pin_memory``.
        batch_size: Global.
        num_samples: In the training set, 0 where that is not known.
        data_keys: Which of these the data module takes.
        on_gpu: Whether the ranks compute on GPUs.
        devices: That ranks on this host use; under ``dp`` one rank uses several.
        ranks_here: Ranks on this host.
        devices_here: GPUs of this host.
        several_hosts: Whether there are ranks on others.
        strategy: Name of its class.
        precision: As the Trainer has it.
        compiled: Whether the net is compiled.
        can_compile: Whether the model takes ``model.compile`` and there is a compiler.
        cores: CPU cores of the host.
        threads: CPU threads of a rank.
        accumulate: Batches of a step of the optimizer.
        automatic: Whether Lightning runs the optimizer.
        log_every_n_steps: As the Trainer has it.
        run_steps: Of the optimizer that the whole run takes, 0 where no end is known.
        num_operations: Differentiable operations of a step, 0 where it is not known or the host does not wait for them.
        operation_us: What the smallest operation takes on this host, forward and backward.
    """

    num_workers: int = 0
    prefetch_factor: int | None = None
    pin_memory: bool = False
    batch_size: int = 0
    num_samples: int = 0
    data_keys: frozenset[str] = field(default_factory=frozenset)
    on_gpu: bool = False
    devices: int = 1
    ranks_here: int = 1
    devices_here: int = 1
    several_hosts: bool = False
    strategy: str = "auto"
    precision: str = "32-true"
    compiled: bool = False
    can_compile: bool = False
    cores: int = 1
    threads: int = 1
    accumulate: int = 1
    automatic: bool = True
    log_every_n_steps: int = 10
    run_steps: int = 0
    num_operations: int = 0
    operation_us: float = 0.0

    @property
    def cores_per_rank(self) -> int:
        return max(1, self.cores // self.ranks_here)

    @property
    def is_crowded(self) -> bool:
        """Whether the ranks of a host compute on more threads than it has cores."""
        return not self.on_gpu and self.ranks_here * self.threads > self.cores


UNCOMPILED = ("DataParallelStrategy", "LayerSplitStrategy", "PipelineStrategy")  # they refuse model.compile=true
SPREAD = ("DDPStrategy", "SingleDeviceStrategy")  # more devices make their batches smaller, and nothing else
SELDOM = 100  # steps between two points of the curves
FEWEST_STEPS = 10  # of an epoch, below which a larger batch is no advice
Remedies = tuple[str, ...]

# What begins with one of these trains to other weights than before, by more than rounding.
INEXACT = (
    "data.batch_size=",
    "trainer.accumulate_grad_batches=",
    "trainer.precision=",
    "trainer/strategy=ddp_powersgd",
    "trainer/strategy=ddp_bf16_compress",
    "trainer/strategy=ddp_local_sgd",
    "callbacks=",
    "+callbacks=",
)


COMPILING = "model.compile=true"


def price(override: str) -> str:
    """What a remedy costs besides being typed; empty where that is nothing."""
    if override == COMPILING:
        return " (for longer trainings: it compiles before they begin)"
    return " (changes what is trained)" if changes_results(override) else ""


def changes_results(override: str) -> bool:
    """Whether a remedy is another experiment, and not the same one faster."""
    return override.startswith(INEXACT)


def against_crowding(facts: Facts) -> Remedies:
    """More threads want to compute than there are cores: as many ranks as cores that the batch can be shared by."""
    if facts.ranks_here <= facts.cores:
        return (f"launch.threads_per_rank={facts.cores_per_rank}",)
    fitting = (ranks for ranks in range(facts.cores, 1, -1) if facts.batch_size % ranks == 0)
    return (f"trainer.devices={next(fitting, 1)}",)


def against_input(facts: Facts) -> Remedies:
    """The loader waits for the dataset: fetch in several processes, one a core at most."""
    advice = []
    workers = min(facts.cores_per_rank, 2 * facts.num_workers or 4)
    if workers > facts.num_workers:
        advice.append(_data(facts, "num_workers", workers))
    if facts.num_workers and (facts.prefetch_factor or 2) < 4:
        advice.append(_data(facts, "prefetch_factor", 4))
    return _known(advice)


def against_transfer(facts: Facts) -> Remedies:
    """A GPU reads page-locked memory faster."""
    return _known([_data(facts, "pin_memory", "true")] if facts.on_gpu and not facts.pin_memory else [])


def against_synchronisation(facts: Facts) -> Remedies:
    """Send less often, or less: at most 3/4, nearly all (NCCL's bf16: half), and half of it vanish."""
    advice: list[str | None] = []
    if facts.automatic:
        advice.append(f"trainer.accumulate_grad_batches={4 * facts.accumulate}")
    if facts.strategy == "DDPStrategy":
        advice.append(f"trainer/strategy={'ddp_bf16_compress' if facts.on_gpu else 'ddp_powersgd'}")
    return _known([*advice, _larger_batch(facts)])


def against_host(facts: Facts, by_operations: bool) -> Remedies:
    """Fewer, larger operations; or fewer turns of the loop."""
    advice = [_compile(facts)] if by_operations else []
    is_short = 0 < facts.run_steps < SELDOM  # it would have no curve
    if not by_operations and facts.log_every_n_steps < SELDOM and not is_short:
        advice.append(f"trainer.log_every_n_steps={SELDOM}")
    return _known([*advice, _larger_batch(facts)])


def against_computing(facts: Facts) -> Remedies:
    """Compute faster, or on more devices."""
    advice: list[str | None] = []
    if facts.strategy == "DataParallelStrategy":
        advice.append("trainer/strategy=ddp")
    if facts.on_gpu and facts.precision in ("32-true", "32"):  # on CPUs without its instructions it is slower
        advice.append("trainer.precision=bf16-mixed")
    more = 2 * facts.devices
    if facts.on_gpu and more <= facts.devices_here and not facts.several_hosts and facts.strategy in SPREAD:
        advice.append(f"trainer.devices={more}")
    if not facts.on_gpu and facts.threads < facts.cores_per_rank:
        advice.append(f"launch.threads_per_rank={facts.cores_per_rank}")
    return _known([*advice, _compile(facts)])


def _compile(facts: Facts) -> str | None:
    may = facts.can_compile and not facts.compiled and facts.strategy not in UNCOMPILED
    return COMPILING if may else None


def _larger_batch(facts: Facts) -> str | None:
    larger = 2 * facts.batch_size
    if not larger or 0 < facts.num_samples < FEWEST_STEPS * larger:
        return None
    return _data(facts, "batch_size", larger)


def _data(facts: Facts, key: str, value: object) -> str | None:
    return f"data.{key}={value}" if key in facts.data_keys else None


def _known(advice: list[str | None]) -> Remedies:
    return tuple(remedy for remedy in advice if remedy is not None)
