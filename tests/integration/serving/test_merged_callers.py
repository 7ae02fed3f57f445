"""Who shares a compiled pass: nobody, one caller's own calls, or everybody; through every way in."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import pytest
import torch

import trocar
from tests.support.models.row_models import MIXES, WIDTH, Mixing, OverRows
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.building import build_here
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.servers.waiting import wait_until
from tests.support.wire.open_inference import arrays_of, infer, request_of
from tests.support.wire.wire import raw_channel
from trocar_server.rpc.call.forwarded import CERTIFICATE, KEY, PEER, GatewayAccess

ENGINE = {"compile_after": 1, "min_gain": 0.0, "kept_variants_bytes": 0, "openvino": False}
ANNA, BERT = "anna", "bert"


def build(kind: str) -> Any:
    return rebuilt(OverRows) if kind == "lstm" else rebuilt(Mixing, mix=kind)


def hosted(kind: str, merge: str) -> dict[str, Any]:
    if kind == "lstm":
        return custom(OverRows, (WIDTH,), merge=merge)
    return custom(Mixing, (WIDTH,), merge=merge, options={"mix": kind})


KINDS = (*MIXES, "lstm")
SETTINGS = ("off", "caller", "everybody")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {f"{kind}-everybody": hosted(kind, "everybody") for kind in KINDS}
    models |= {f"none-{merge}": hosted("none", merge) for merge in SETTINGS}
    models["unset"] = custom(Mixing, (WIDTH,), options={"mix": "none"})
    with running_server(models=models, device="cpu", engine=ENGINE) as server:
        build_here(server)
        yield server


def as_caller(server: RunningServer, token: str | None) -> trocar.Client:
    return trocar.connect(server.address, token=token)


def ready(server: RunningServer, model_id: str, *, is_compiled: bool = True) -> None:
    """Ask until nothing changes any more; groups may then have any number of rows."""
    with as_caller(server, None) as client:
        for i in range(
            7
        ):  # with every size that a test uses: a new one is recorded by the thread that computes
            client.extract(
                model_id, noise(1 + i % 3, WIDTH), "linear", options=trocar.options(numerics="fast")
            )
            server.run(server.engine.compiled.settled)
        found = client.extract(model_id, noise(3, WIDTH), "linear", options=trocar.options(numerics="fast"))
    assert (found.execution.engine != "eager") is is_compiled
    for variant in server.engine.compiled.variants():
        variant.queue._most_rows = lambda: 64


@contextmanager
def held(server: RunningServer) -> Iterator[None]:
    """Hold the thread that computes until the context ends: meanwhile calls queue."""
    may_go = threading.Event()
    server.run(lambda: _submitted(server, may_go))
    try:
        yield
    finally:
        may_go.set()


async def _submitted(server: RunningServer, may_go: threading.Event) -> None:
    server.engine.owner.submit(may_go.wait)


def waiting(server: RunningServer) -> int:
    async def count() -> int:
        variants = server.engine.compiled.variants()
        return sum(variant.queue.waiting_count + variant.queue.is_running for variant in variants)

    return server.run(count)


Ask = Callable[[Array], tuple[Array, int]]
"""Makes one call, and returns the values and the rows of its pass."""


def extracts(client: trocar.Client, model_id: str) -> Ask:
    def ask(rows: Array) -> tuple[Array, int]:
        found = client.extract(model_id, rows, "linear", options=trocar.options(numerics="fast"))
        return found["linear"], found.execution.row_count

    return ask


def streams(client: trocar.Client, model_id: str) -> Ask:
    def ask(rows: Array) -> tuple[Array, int]:
        with client.extract_stream(
            model_id, [rows], ["linear"], options=trocar.options(numerics="fast")
        ) as stream:
            (found,) = (result.unwrap() for result in stream)
        return found["linear"], found.execution.row_count

    return ask


def at_once(server: RunningServer, asks: Sequence[Ask], batches: Sequence[Array]) -> list[tuple[Array, int]]:
    """Make calls one behind the other while nothing is computed: the first runs alone, the others wait."""
    with ThreadPoolExecutor(len(asks)) as threads:
        with held(server):
            calls = []
            for ask, batch in zip(asks, batches, strict=True):
                calls.append(threads.submit(ask, batch))
                wait_until(lambda: waiting(server) >= len(calls))
        return [call.result(60) for call in calls]


def batches_of(caller: str, count: int = 3) -> list[Array]:
    """Batches of 1, 2, ... rows that no other caller has."""
    seed = 100 if caller == ANNA else 200
    return [noise(1 + i, WIDTH, seed=seed + i) * (3 if caller == ANNA else 50) for i in range(count)]


def expected(kind: str, rows: Array) -> Array:
    with torch.inference_mode():
        return np.asarray(build(kind)(torch.from_numpy(rows)))


def is_close(found: Array, wanted: Array) -> bool:
    return bool(np.linalg.norm(found - wanted) <= 1e-5 * np.linalg.norm(wanted))


@pytest.mark.parametrize("kind", KINDS)
def test_no_reply_has_anything_of_another_call(server: RunningServer, kind: str) -> None:
    """Where everybody may be merged and rows mix, or are not proved to be apart, every call runs alone."""
    model_id = f"{kind}-everybody"
    ready(server, model_id, is_compiled=kind != "earlier")  # which makes a tensor on another device
    anna, bert = batches_of(ANNA), batches_of(BERT)
    with as_caller(server, ANNA) as first, as_caller(server, BERT) as second, as_caller(server, None) as none:
        ask, other, nobody = (extracts(client, model_id) for client in (first, second, none))
        asks = [nobody, ask, other, ask, other, ask, other]
        given = [noise(1, WIDTH), anna[0], bert[0], anna[1], bert[1], anna[2], bert[2]]
        if kind == "earlier":  # it is computed eagerly, and waits in no queue of a compiled pass
            replies = [ask(rows) for ask, rows in zip(asks, given, strict=True)]
        else:
            replies = at_once(server, asks, given)
    assert [rows for _, rows in replies] == ([1, *[12] * 6] if kind == "none" else [1, 1, 1, 2, 2, 3, 3])
    for (values, _), rows in zip(replies, given, strict=True):
        assert is_close(values, expected(kind, rows))


@pytest.mark.parametrize(("merge", "rows"), [("off", [1, 1, 1, 2, 2, 3, 3]), ("caller", [1, *[6] * 6])])
def test_a_caller_shares_with_itself_where_it_may(server: RunningServer, merge: str, rows: list[int]) -> None:
    model_id = f"none-{merge}"
    ready(server, model_id)
    anna, bert = batches_of(ANNA), batches_of(BERT)
    with as_caller(server, ANNA) as first, as_caller(server, BERT) as second, as_caller(server, None) as none:
        ask, other, nobody = (extracts(client, model_id) for client in (first, second, none))
        asks = [nobody, ask, other, ask, other, ask, other]
        given = [noise(1, WIDTH), anna[0], bert[0], anna[1], bert[1], anna[2], bert[2]]
        replies = at_once(server, asks, given)
    assert [count for _, count in replies] == rows
    for (values, _), batch in zip(replies, given, strict=True):
        assert is_close(values, expected("none", batch))


def test_a_model_whose_operator_said_nothing_merges_a_caller_with_itself(server: RunningServer) -> None:
    ready(server, "unset")
    given = [noise(2, WIDTH, seed=i) for i in range(4)]
    with as_caller(server, ANNA) as anna, as_caller(server, None) as none:
        own, nobody = extracts(anna, "unset"), extracts(none, "unset")
        assert [count for _, count in at_once(server, [own] * 4, given)] == [2, 6, 6, 6]
        assert [count for _, count in at_once(server, [nobody] * 4, given)] == [2] * 4


@pytest.mark.parametrize(("merge", "expected"), [("caller", [1] * 4), ("everybody", [1, 3, 3, 3])])
def test_callers_without_a_token_share_only_with_everybody(
    server: RunningServer, merge: str, expected: list[int]
) -> None:
    ready(server, f"none-{merge}")
    with as_caller(server, None) as one, as_caller(server, None) as other:
        asks = [extracts(client, f"none-{merge}") for client in (one, other, one, other)]
        found = at_once(server, asks, [noise(1, WIDTH, seed=i) for i in range(4)])
    assert [count for _, count in found] == expected


def test_everybody_is_everybody(server: RunningServer) -> None:
    ready(server, "none-everybody")
    given = [noise(1 + i, WIDTH, seed=i) for i in range(4)]
    with as_caller(server, ANNA) as anna, as_caller(server, BERT) as bert, as_caller(server, None) as none:
        asks = [extracts(client, "none-everybody") for client in (anna, bert, none, anna)]
        found = at_once(server, asks, given)
    assert [count for _, count in found] == [1, 9, 9, 9]
    for (values, _), rows in zip(found, given, strict=True):
        assert is_close(values, expected("none", rows))


def test_a_call_that_refuses_runs_alone(server: RunningServer) -> None:
    ready(server, "none-everybody")
    with as_caller(server, ANNA) as anna:

        def alone(rows: Array) -> tuple[Array, int]:
            found = anna.extract(
                "none-everybody", rows, "linear", options=trocar.options(numerics="fast", merge=False)
            )
            return found["linear"], found.execution.row_count

        ask = extracts(anna, "none-everybody")
        found = at_once(server, [ask, ask, alone, ask, ask], [noise(1, WIDTH)] * 5)
    assert [count for _, count in found] == [1, 1, 1, 2, 2]


def test_streams_are_merged_by_the_same_rule(server: RunningServer) -> None:
    ready(server, "none-caller")
    anna, bert = batches_of(ANNA), batches_of(BERT)
    with as_caller(server, ANNA) as first, as_caller(server, BERT) as second:
        own, other = streams(first, "none-caller"), streams(second, "none-caller")
        asks = [other, own, other, own, extracts(first, "none-caller")]
        found = at_once(server, asks, [bert[0], anna[0], bert[1], anna[1], anna[2]])
    assert [count for _, count in found] == [1, 6, 2, 6, 6]
    assert is_close(found[2][0], expected("none", bert[1]))
    merged = np.concatenate([found[1][0], found[3][0], found[4][0]])
    assert is_close(merged, expected("none", np.concatenate(anna)))


def test_the_open_inference_protocol_merges_by_the_same_rule(server: RunningServer) -> None:
    ready(server, "none-caller")
    anna, bert = batches_of(ANNA), batches_of(BERT)
    with raw_channel(server.address) as channel, as_caller(server, BERT) as second:

        def ask_as(caller: str) -> Ask:
            def ask(rows: Array) -> tuple[Array, int]:
                request = request_of("none-caller", {"x": rows}, ["linear"])
                request.parameters["numerics"].string_param = "fast"
                call = infer(channel, request, metadata=[("authorization", f"Bearer {caller}")])
                return arrays_of(call)["linear"], 0

            return ask

        asks = [ask_as(BERT), ask_as(ANNA), ask_as(BERT), extracts(second, "none-caller")]
        found = at_once(server, asks, [bert[0], anna[1], bert[1], bert[2]])
    assert found[3][1] == 5
    assert is_close(found[1][0], expected("none", anna[1]))
    assert is_close(
        np.concatenate([found[2][0], found[3][0]]), expected("none", np.concatenate([bert[1], bert[2]]))
    )


def test_calls_of_a_gateway_are_merged_as_those_of_its_callers() -> None:
    """All of them come over one connection, from one peer."""
    access = GatewayAccess(key="of the cluster")
    models = {"net": hosted("none", "caller")}
    with running_server(models=models, device="cpu", engine=ENGINE, gateway=access) as server:
        build_here(server)
        ready(server, "net")
        with raw_channel(server.address) as channel:

            def forwarded(token: str | None) -> Ask:
                metadata: list[tuple[str, str | bytes]] = [(KEY, access.key), (PEER, "ipv4:10.0.0.7:5")]
                metadata += [(CERTIFICATE, b"{}")]
                metadata += [("authorization", f"Bearer {token}")] if token else []

                def ask(rows: Array) -> tuple[Array, int]:
                    request = request_of("net", {"x": rows}, ["linear"])
                    request.parameters["numerics"].string_param = "fast"
                    return arrays_of(infer(channel, request, metadata=metadata))["linear"], 0

                return ask

            callers = (None, ANNA, BERT, None, ANNA, None)
            given = [noise(1 + i % 3, WIDTH, seed=i) for i in range(6)]
            found = at_once(server, [forwarded(caller) for caller in callers], given)
    for index in (0, 2, 3, 5):
        assert is_close(found[index][0], expected("none", given[index]))
    own = np.concatenate([found[1][0], found[4][0]])
    assert is_close(own, expected("none", np.concatenate([given[1], given[4]])))


def test_prepared_calls_are_merged_by_the_same_rule(tmp_path_factory: pytest.TempPathFactory) -> None:
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    models = {"net": hosted("none", "caller")}
    with running_server(models=models, device="cpu", engine=ENGINE, host=host) as server:
        build_here(server)
        address = server.app.rpc.address
        with trocar.connect(address, token=ANNA) as anna, trocar.connect(address, token=BERT) as bert:
            rows = noise(2, WIDTH)
            for _ in range(7):
                anna.extract("net", rows, "linear", options=trocar.options(numerics="fast"))
                server.run(server.engine.compiled.settled)
            for variant in server.engine.compiled.variants():
                variant.queue._most_rows = lambda: 64
            given = [noise(2, WIDTH, seed=seed) for seed in range(5)]
            with ExitStack() as stack:

                def prepared(client: trocar.Client) -> Ask:
                    made = stack.enter_context(
                        client.prepare("net", rows, "linear", options=trocar.options(numerics="fast"))
                    )

                    def ask(batch: Array) -> tuple[Array, int]:
                        found = made(batch)
                        return found["linear"].copy(), found.execution.row_count

                    return ask

                asks = [prepared(client) for client in (bert, anna, bert, anna, bert)]
                found = at_once(server, asks, given)
    assert [count for _, count in found] == [2, 4, 4, 4, 4]
    for first, second in ((1, 3), (2, 4)):
        own = np.concatenate([found[first][0], found[second][0]])
        assert is_close(own, expected("none", np.concatenate([given[first], given[second]])))
