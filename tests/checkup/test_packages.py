"""Which packages don't fit each other."""

from project.checkup.finding import Status
from project.checkup.packages import check, conflicts

NEEDS = {
    "root": ["a>=1", "b; extra == 'more'"],
    "a": ["c<2", "old (>=1.*)", 'never; python_version < "3"'],
    "c": ["root"],  # circles end
    "b": ["missing"],
}


def found(versions: dict[str, str]) -> list[tuple[str, str, str | None]]:
    return [(f.name, f.value, f.remedy) for f in conflicts("root", NEEDS.get, versions.get)]


def test_packages_that_fit_are_not_mentioned() -> None:
    assert found({"root": "1", "a": "1.5", "c": "1.9"}) == []


def test_a_package_that_another_cant_use_is_told_with_the_command() -> None:
    assert found({"root": "1", "a": "1.5", "c": "2.0"}) == [
        ("a", "1.5 needs c<2, and 2.0 is installed", 'pip install "c<2"')
    ]
    assert found({"root": "1", "a": "1.5"}) == [("a", "1.5 needs c<2, and none is installed", 'pip install "c<2"')]


def test_what_only_an_extra_needs_may_be_missing() -> None:
    assert found({"root": "1", "b": "1"}) == []


def test_what_the_project_needs_is_here() -> None:
    by_name = {finding.name: finding for finding in check()}
    assert {"Python", "torch", "lightning", "hydra-core"} <= by_name.keys()
    assert all(finding.status == Status.GOOD for name, finding in by_name.items() if name in ("torch", "lightning"))
