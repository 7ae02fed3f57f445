"""Compiled passes against exact ones, at the tolerance that they promise: numbers at the ends; company."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from random import Random
from typing import Any

import numpy as np
import pytest

import trocar
from tests.relations.families import FAMILIES
from tests.relations.family import Array
from tests.relations.layouts import places
from tests.relations.outcome import Outcome
from tests.relations.replies import close, parts
from tests.support.servers.running_server import RunningServer
from tests.support.servers.waiting import wait_until

MERGED = ("tagger", "volume", "convnext", "unet")
"""Families whose rows are independent, which is proved for their compiled passes."""
COMPILED = ("tagger", "volume", "convnext", "unet", "last-state", "tuple")
"""Families of floats, which may hold any number."""
ENGINE: Mapping[str, Any] = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0}
SPECIAL = {
    "usual": (),
    "nan": (np.nan,),
    "infinities": (np.inf, -np.inf),
    "negative zero": (-0.0, 0.0),
    "huge": (1e38, -1e38),
}
"""Numbers that the inputs have beside usual ones."""


def compiled(
    server: RunningServer, client: trocar.Client, name: str, special: str, chance: Random
) -> Outcome:
    """Compare `numerics="fast"`, asked until it is compiled, with an exact pass."""
    outcome = Outcome("compiled", name)
    known = [place for place in places(name) if place.is_float]
    taps = [trocar.tap(place.selector) for place in chance.sample(known, min(2, len(known)))]
    inputs = _with(one_input(name, chance.randrange(10**6)), SPECIAL[special], chance)
    usual = one_input(name, 0)
    until_compiled(server, lambda: client.extract(name, usual, taps, options=trocar.options(numerics="fast")))
    exact = parts(client.extract(name, inputs, taps, options=trocar.options(numerics="exact")))
    fast = parts(client.extract(name, inputs, taps, options=trocar.options(numerics="fast")))
    for part in exact:
        outcome.comparison.note(part, fast[part], exact[part], close(1e-5))
    return outcome


def until_compiled(server: RunningServer, ask: Callable[[], object]) -> None:
    """Ask until nothing changes any more."""
    for _ in range(7):
        ask()
        server.run(server.engine.compiled.settled)


def company(
    server: RunningServer, client: trocar.Client, model_id: str, inputs: Sequence[Array], taps: list[str]
) -> tuple[Outcome, int]:
    """Compare calls that share a compiled pass, in this order, with exact passes of each alone.

    Returns:
        The outcome, and the most rows of a pass.
    """
    outcome = Outcome("company", model_id)
    until_compiled(
        server, lambda: client.extract(model_id, inputs[0], taps, options=trocar.options(numerics="fast"))
    )
    exact = [
        parts(client.extract(model_id, one, taps, options=trocar.options(numerics="exact"))) for one in inputs
    ]
    queue = server.engine.compiled.queues(server.engine.deployment(model_id))[-1]
    go_on = threading.Event()
    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(len(inputs) + 2) as callers:
        patch.setattr(queue, "_most_rows", lambda: 32)  # otherwise as long groups as measurements allow

        def begun(one: Array, is_begun: Callable[[], bool]) -> "Future[trocar.FeatureMaps]":
            call = callers.submit(
                client.extract, model_id, one, taps, options=trocar.options(numerics="fast", cache=False)
            )
            wait_until(is_begun)
            return call

        holding = callers.submit(server.on_owner, go_on.wait)
        try:
            first = begun(inputs[0], lambda: queue.is_running)
            calls = [
                begun(one, lambda count=number + 1: queue.waiting_count == count)  # type: ignore[misc]
                for number, one in enumerate(inputs)
            ]
        finally:
            go_on.set()
        holding.result()
        first.result()
        replies = [call.result() for call in calls]
    for number, (mine, reply) in enumerate(zip(exact, replies, strict=True)):
        theirs = parts(reply)
        for part in mine:
            outcome.comparison.note(part, theirs[part], mine[part], close(1e-5), f" of call {number}")
    return outcome, max(reply.execution.row_count for reply in replies)


def one_input(name: str, seed: int) -> Array:
    """Return the one argument of a family, to be sent by position."""
    (value,) = FAMILIES[name].inputs(np.random.default_rng(seed)).values()
    return value


def _with(value: Array, numbers: tuple[float, ...], chance: Random) -> Array:
    for number in numbers:
        value.reshape(-1)[chance.randrange(value.size)] = number
    return value
