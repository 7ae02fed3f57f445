"""Digests instead of inputs: when they are sent, what they cover, and what happens when nobody knows them."""

import hashlib
from collections.abc import Iterable, Iterator

import grpc
import numpy as np
import pytest

import trocar
from tests.unit.client.conftest import Connect
from tests.unit.client.fake_server import FakeServer, Received, echo, error_trailer, reply_head
from trocar._wire.digests import KEPT, PATIENCE, Digests, SentDigests, digests_of
from trocar._wire.requests import extract_call
from trocar_api.v1.extraction_pb2 import ExtractRequest

ARRAY = np.arange(12, dtype=np.float32).reshape(3, 4)


class KnowsDigests:
    """Answers as a server with a feature cache does, as long as it keeps anything."""

    def __init__(self) -> None:
        self.keeps = True
        self.kept: dict[bytes, Received] = {}

    def __call__(self, received: Received, context: grpc.ServicerContext) -> Iterator[bytes]:
        digest = received.head.payload_digest
        if not digest:
            if self.keeps:
                self.kept[hashlib.sha256(b"".join(received.payloads)).digest()] = received
            yield from echo(received, context)
        elif digest in self.kept:
            answer = reply_head({})
            answer.execution.is_cached = True
            yield answer.SerializeToString()
        else:
            context.set_trailing_metadata((error_trailer(grpc.StatusCode.NOT_FOUND, "no", "NOT_CACHED"),))
            context.abort(grpc.StatusCode.NOT_FOUND, "no")


@pytest.fixture
def cache(server: FakeServer) -> KnowsDigests:
    server.behaviour = KnowsDigests()
    return server.behaviour


def kinds(received: Iterable[Received]) -> list[str]:
    return ["digest" if entry.head.payload_digest else "inputs" for entry in received]


def test_what_was_sent_before_goes_out_as_a_digest(
    connect: Connect, server: FakeServer, cache: KnowsDigests
) -> None:
    client = connect(server.target, options=trocar.options(cache=True))
    found = [client.extract("m", ARRAY, ["a"]) for _ in range(3)]
    assert kinds(server.received) == ["inputs", "digest", "digest"]
    assert [maps.is_cached for maps in found] == [False, True, True]


@pytest.mark.parametrize("choice", [None, False])
def test_no_digests_are_sent_unless_asked_for(
    connect: Connect, server: FakeServer, cache: KnowsDigests, choice: bool | None
) -> None:
    client = connect(server.target, options=trocar.options(cache=choice))
    for _ in range(3):
        client.extract("m", ARRAY, ["a"])
    assert kinds(server.received) == ["inputs"] * 3
    assert [entry.head.execution.HasField("cache") for entry in server.received] == [choice is False] * 3


def test_one_call_can_choose_otherwise(connect: Connect, server: FakeServer, cache: KnowsDigests) -> None:
    client = connect(server.target)
    client.extract("m", ARRAY, ["a"], options=trocar.options(cache=True))
    client.extract("m", ARRAY, ["a"], options=trocar.options(cache=True))
    client.extract("m", ARRAY, ["a"], options=trocar.options(cache=False))
    client.extract("m", ARRAY, ["a"])
    assert kinds(server.received) == ["inputs", "digest", "inputs", "inputs"]
    assert not server.received[2].head.execution.cache
    assert server.received[2].head.execution.HasField("cache")


def test_a_digest_that_is_not_known_any_more_is_followed_by_the_inputs(
    connect: Connect, server: FakeServer, cache: KnowsDigests
) -> None:
    client = connect(server.target, options=trocar.options(cache=True))
    client.extract("m", ARRAY, ["a"])
    cache.kept.clear()
    maps = client.extract("m", ARRAY, ["a"])
    np.testing.assert_array_equal(maps["a"], ARRAY)
    assert kinds(server.received) == ["inputs", "digest", "inputs"]


def test_arrays_to_fill_are_filled_after_a_digest_that_was_not_known(
    connect: Connect, server: FakeServer, cache: KnowsDigests
) -> None:
    client, out = connect(server.target, options=trocar.options(cache=True)), np.zeros_like(ARRAY)
    client.extract("m", ARRAY, ["a"])
    cache.kept.clear()
    assert client.extract("m", ARRAY, ["a"], out={"a": out})["a"] is out
    np.testing.assert_array_equal(out, ARRAY)


def test_a_server_that_keeps_nothing_is_soon_asked_no_more(
    connect: Connect, server: FakeServer, cache: KnowsDigests
) -> None:
    cache.keeps = False
    client = connect(server.target, options=trocar.options(cache=True))
    for _ in range(10):
        client.extract("m", ARRAY, ["a"])
    assert kinds(server.received).count("digest") == PATIENCE
    assert kinds(server.received).count("inputs") == 10


def test_other_errors_are_not_taken_for_a_digest_that_is_not_known(
    connect: Connect, server: FakeServer, cache: KnowsDigests
) -> None:
    client = connect(server.target, options=trocar.options(cache=True))
    client.extract("m", ARRAY, ["a"])
    server.fail(grpc.StatusCode.NOT_FOUND, "no model 'm'", "UNKNOWN_MODEL")
    with pytest.raises(trocar.errors.UnknownModelError):
        client.extract("m", ARRAY, ["a"])


def test_the_digest_is_of_all_payloads_one_after_the_other() -> None:
    call = extract_call("m", (ARRAY, ARRAY + 1), ["a"])
    expected = hashlib.sha256(ARRAY.tobytes() + (ARRAY + 1).tobytes()).digest()
    asked = ExtractRequest.FromString(digests_of(call).question)
    assert asked.payload_digest == expected
    asked.ClearField("payload_digest")
    assert asked == ExtractRequest.FromString(call.head)


def test_calls_that_differ_in_anything_are_told_apart() -> None:
    calls = [
        extract_call("m", ARRAY, ["a"]),
        extract_call("n", ARRAY, ["a"]),
        extract_call("m", ARRAY, ["b"]),
        extract_call("m", ARRAY + 1, ["a"]),
        extract_call("m", ARRAY.reshape(4, 3), ["a"]),
    ]
    assert len({digests_of(call).call for call in calls}) == len(calls)


def test_what_is_remembered_is_bounded_and_the_oldest_goes() -> None:
    sent = SentDigests()
    every = [Digests(i.to_bytes(32, "big"), b"") for i in range(KEPT + 10)]
    for digests in every:
        sent.note(digests, is_cached=False)
    assert [sent.is_worth_asking(digests) for digests in every] == [False] * 10 + [True] * KEPT


def test_an_answer_from_the_cache_restores_trust() -> None:
    sent, digests = SentDigests(), Digests(b"d" * 32, b"")
    for _ in range(PATIENCE + 1):
        sent.note(digests, is_cached=False)
    assert not sent.is_worth_asking(digests)
    sent.note(digests, is_cached=True)
    assert sent.is_worth_asking(digests)
