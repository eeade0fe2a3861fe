"""Advice is what this run does not have yet, and what its devices can use."""

from dataclasses import replace

import pytest
from hydra import compose, initialize_config_dir

from project.config.composition import config_folder, register_resolvers
from project.tracking import remedies
from project.tracking.facts import DATA_KEYS
from project.tracking.remedies import Facts

PLAIN = Facts(
    batch_size=64,
    data_keys=frozenset(DATA_KEYS),
    strategy="DDPStrategy",
    cores=8,
    threads=4,
    devices=2,
    ranks_here=2,
    can_compile=True,
)
ON_GPU = replace(PLAIN, on_gpu=True, devices_here=8)


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (PLAIN, ("data.num_workers=4",)),
        (replace(PLAIN, cores=2), ("data.num_workers=1",)),
        (replace(PLAIN, num_workers=1), ("data.num_workers=2", "data.prefetch_factor=4")),
        (replace(PLAIN, num_workers=3), ("data.num_workers=4", "data.prefetch_factor=4")),
        (replace(PLAIN, num_workers=4, prefetch_factor=4), ()),  # a worker a core
        (replace(PLAIN, num_workers=9, prefetch_factor=8), ()),
        (replace(PLAIN, data_keys=frozenset()), ()),  # another data module
    ],
)
def test_against_input(facts: Facts, advice: tuple[str, ...]) -> None:
    assert remedies.against_input(facts) == advice


@pytest.mark.parametrize(
    ("cores", "ranks", "batch_size", "remedy"),
    [
        (2, 4, 64, "trainer.devices=2"),
        (7, 8, 64, "trainer.devices=4"),  # which share the batch equally
        (3, 4, 0, "trainer.devices=3"),  # of a size that is not known
        (1, 2, 64, "trainer.devices=1"),
        (8, 4, 64, "launch.threads_per_rank=2"),
    ],
)
def test_against_crowding(cores: int, ranks: int, batch_size: int, remedy: str) -> None:
    facts = replace(PLAIN, cores=cores, ranks_here=ranks, batch_size=batch_size)
    assert facts.is_crowded
    assert remedies.against_crowding(facts) == (remedy,)


@pytest.mark.parametrize(
    ("facts", "advice"),
    [(ON_GPU, ("data.pin_memory=true",)), (replace(ON_GPU, pin_memory=True), ()), (PLAIN, ())],
)
def test_against_transfer(facts: Facts, advice: tuple[str, ...]) -> None:
    assert remedies.against_transfer(facts) == advice


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (PLAIN, ("trainer.accumulate_grad_batches=4", "trainer/strategy=ddp_powersgd", "data.batch_size=128")),
        (ON_GPU, ("trainer.accumulate_grad_batches=4", "trainer/strategy=ddp_bf16_compress", "data.batch_size=128")),
        (
            replace(PLAIN, accumulate=4, batch_size=0),
            ("trainer.accumulate_grad_batches=16", "trainer/strategy=ddp_powersgd"),
        ),
        (replace(PLAIN, strategy="CompressedDDPStrategy", automatic=False), ("data.batch_size=128",)),
    ],
)
def test_against_synchronisation(facts: Facts, advice: tuple[str, ...]) -> None:
    assert remedies.against_synchronisation(facts) == advice


@pytest.mark.parametrize(
    ("facts", "by_operations", "advice"),
    [
        (PLAIN, False, ("trainer.log_every_n_steps=100", "data.batch_size=128")),
        (replace(PLAIN, log_every_n_steps=100), False, ("data.batch_size=128",)),
        (replace(PLAIN, run_steps=100), False, ("trainer.log_every_n_steps=100", "data.batch_size=128")),
        (replace(PLAIN, run_steps=99), False, ("data.batch_size=128",)),  # it would have no curve
        (replace(PLAIN, log_every_n_steps=100, num_samples=1280), False, ("data.batch_size=128",)),
        (replace(PLAIN, log_every_n_steps=100, num_samples=1279), False, ()),
        (PLAIN, True, ("model.compile=true", "data.batch_size=128")),
        (replace(PLAIN, compiled=True), True, ("data.batch_size=128",)),
    ],
)
def test_against_host(facts: Facts, by_operations: bool, advice: tuple[str, ...]) -> None:
    assert remedies.against_host(facts, by_operations) == advice


@pytest.mark.parametrize(
    ("facts", "advice"),
    [
        (ON_GPU, ("trainer.precision=bf16-mixed", "trainer.devices=4", "model.compile=true")),
        (replace(ON_GPU, precision="bf16-mixed", devices=8), ("model.compile=true",)),
        (replace(ON_GPU, precision="bf16-true", several_hosts=True, compiled=True), ()),
        (PLAIN, ("model.compile=true",)),  # bf16 is slower on most CPUs
        (replace(PLAIN, threads=1), ("launch.threads_per_rank=4", "model.compile=true")),
        (replace(PLAIN, can_compile=False), ()),
        (replace(PLAIN, strategy="PipelineStrategy"), ()),
        (replace(PLAIN, strategy="DataParallelStrategy"), ("trainer/strategy=ddp",)),
    ],
)
def test_against_computing(facts: Facts, advice: tuple[str, ...]) -> None:
    assert remedies.against_computing(facts) == advice


def test_every_remedy_is_an_override_that_the_config_takes() -> None:
    facts = [PLAIN, ON_GPU, replace(PLAIN, num_workers=1, threads=1), replace(PLAIN, strategy="DataParallelStrategy")]
    advice = {
        remedy
        for each in facts
        for remedy in (
            *remedies.against_input(each),
            *remedies.against_transfer(each),
            *remedies.against_synchronisation(each),
            *remedies.against_host(each, by_operations=True),
            *remedies.against_host(each, by_operations=False),
            *remedies.against_computing(each),
        )
    }
    assert len(advice) >= 12
    register_resolvers()
    groups = {remedy for remedy in advice if "/" in remedy}  # one choice at a time
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        for choice in groups:
            compose("train", [choice, *(advice - groups)])
