"""Samples of long lists of parameters: eight of each test's, other ones in each run.

    make test                                           # eight of each, by a seed that the run prints
    make test PYTEST_ARGS="--sample-seed 123"           # the same eight once more
    make test PYTEST_ARGS="--sample 0"                  # all parameters

A test with a list of parameters has one for each model, dtype or field. Nobody who changes a line wants to
wait for all 244 methods of a table; `make test-all` runs them.
"""

from __future__ import annotations

import os
import random
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    import pytest

SAMPLE = 8
"""So many parameters of a test run where not all do."""

_SEED = "TROCAR_SAMPLE_SEED"
"""How a run tells its seed to its workers, which are processes of their own."""


def function_of(item: pytest.Item) -> str:
    """Return the id of a test's function, `tests/unit/test_x.py::test_y`: its own without parameters."""
    return item.nodeid.partition("[")[0]


def add_options(parser: pytest.Parser) -> None:
    """Add the options of a sample."""
    group = parser.getgroup("trocar")
    group.addoption(
        "--sample", type=int, default=0, help="run so many parameters of each test at most; 0: all"
    )
    group.addoption("--sample-seed", type=int, help="which ones; another one in each run without it")


def configure(config: pytest.Config) -> None:
    """Choose this run's seed, unless it is given or this is a worker."""
    given = config.getoption("sample_seed")
    if given is not None:
        os.environ[_SEED] = str(given)
    os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(10**6)))


def header(config: pytest.Config) -> list[str]:
    """Return the line in which a run with a sample tells its seed."""
    if not config.getoption("sample"):
        return []
    return [
        f"at most {config.getoption('sample')} parameters of each test: --sample-seed {os.environ[_SEED]}"
    ]


def sampled(items: Sequence[pytest.Item], most: int, seed: str) -> list[pytest.Item]:
    """Return at most so many tests of each function, in their order."""
    by_function: dict[str, list[pytest.Item]] = {}
    for item in items:
        by_function.setdefault(function_of(item), []).append(item)
    kept = set[str]()
    for function, members in by_function.items():
        if len(members) > most:
            # Of each function its own draw: what one test's list gains does not change another's sample.
            members = random.Random(f"{seed} {function}").sample(members, most)  # noqa: PLW2901
        kept.update(item.nodeid for item in members)
    return [item for item in items if item.nodeid in kept]


def select(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave a sample of the collected tests, if this run has one."""
    if most := config.getoption("sample"):
        rest = sampled(items, most, os.environ[_SEED])
        kept = {id(item) for item in rest}
        config.hook.pytest_deselected(items=[item for item in items if id(item) not in kept])
        items[:] = rest
