"""Histories of passes, of streams, and of the configuration, and their models.

The model of the engine: of the calls that are open at most as many have a replica as there are, the others
wait, and each is answered as if it were alone. That of a stream: its checkpoints, by the number of batches
before them; from each, the statistics at the end are those of one stream without an interruption. That of the
configuration: the one that was read last, which answers every call, and whether the server drains.
"""

# pyright: reportArgumentType=false

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

import trocar
from tests.orders import server_calls
from tests.orders.history import LEFT, History, Registers, turns
from tests.orders.world import served
from tests.support.models.tiny_models import Plain
from tests.support.models.trainable_nets import SteadyNet
from tests.support.orders.seeded_loop import run
from tests.support.servers.serving import custom
from tests.support.wire.wire import chunk, request, tensor
from trocar._wire.stream_messages import StreamAssembler, StreamOptions, batch_call, start_call
from trocar_api.v1 import extraction_pb2, model_pb2, server_pb2
from trocar_server.config import ServerConfig

if TYPE_CHECKING:
    from tests.support.orders.doorway import Answer, Call

EXTRACT = "ExtractionService/Extract"


def asking(seed: int) -> extraction_pb2.ExtractRequest:
    """Return a request of the model `plain`."""
    inputs = [tensor((2, *server_calls.SHAPE))]
    return request("plain", "conv", inputs=inputs, chunks=[chunk(server_calls.values(seed))])


def values_of(answer: Answer) -> bytes:
    """Return the values of a reply."""
    replies = map(extraction_pb2.ExtractResponse.FromString, answer.replies)
    return b"".join(one.data for reply in replies for one in reply.chunks)


class Engine(History):
    """Passes of one model, which is unloaded and loaded meanwhile."""

    replica_count: ClassVar[int] = 1
    settings: ClassVar[dict[str, Any]] = {
        "models": {"plain": custom(Plain, server_calls.SHAPE)},
        "limits": {"feature_cache_bytes": 0},
    }

    def prepare(self) -> None:
        self.alone: dict[int, bytes] = {}

    @rule(numbers=st.lists(st.integers(0, 3), min_size=1, max_size=4))
    def several(self, numbers: list[int]) -> None:
        for number in numbers:
            self.extract(number)

    def extract(self, seed: int) -> None:
        self.call(seed, EXTRACT, asking(seed))

    @rule(count=turns)
    def cut_off_one_that_waits(self, count: int) -> None:
        """Cut a call off around the moment when it gets the replica of the one before it."""
        self.extract(0)
        self.extract(1)
        self.go_on(count)
        self.cut_off(len(self.open) - 1, is_lost=False)

    @rule(is_there=st.booleans())
    def load(self, is_there: bool) -> None:
        kind = model_pb2.LoadModelRequest if is_there else model_pb2.UnloadModelRequest
        name = "LoadModel" if is_there else "UnloadModel"
        self.call(None, f"ModelService/{name}", kind(model_id="plain"))

    def answered(self, what: int | None, call: Call) -> None:
        if what is None or not call.answer.is_ok:
            assert call.answer.code in (
                "OK",
                "GONE",
                "CANCELLED",
                "FAILED_PRECONDITION",
                "RESOURCE_EXHAUSTED",
            )
            return
        values = values_of(call.answer)
        assert values == self.alone.setdefault(what, values)

    @invariant()
    def replicas_are_lent_once(self) -> None:
        for deployment in self.server.app.engine.deployments.values() if hasattr(self, "server") else ():
            pool = deployment.pool
            assert 0 <= pool.leased_count <= pool.count == self.replica_count
            assert pool.leased_count + pool.waiting_count <= len(self.open)


BATCHES = 6
STREAM = "StreamService/ExtractStream"


def streaming(first: int, end: int, checkpoint: bytes | None) -> list[bytes]:
    """Return the messages of a stream from one batch to before another."""
    options = StreamOptions(
        model_id="plain",
        taps=(trocar.tap("conv", stats=["mean", "var", "l2"], over="channel", values=False),),
        first_batch=first,
        batch_timeout_s=60.0,
        window=4,
        has_running_statistics=True,
        checkpoint=checkpoint,
        checkpoint_interval=1,
    )
    messages = list(start_call(options, first, checkpoint).messages())
    for number in range(first, end):
        values = np.frombuffer(server_calls.values(number), np.float32).reshape(2, *server_calls.SHAPE)
        messages += batch_call(number, values).messages()
    return messages


def assembled(first: int, answer: Answer) -> tuple[dict[int, bytes], bytes | None]:
    """Return the checkpoints of a reply by the number of batches, and its statistics if it ended."""
    assembler = StreamAssembler("plain", first)
    results = [result for message in answer.replies for result in assembler.feed(message)]
    for result in results:
        result.unwrap()
    checkpoints = {one.index + 1: one.checkpoint for one in results if one.checkpoint is not None}
    end = assembler.end
    return checkpoints, None if end is None else _statistics(end)


def _statistics(end: Any) -> bytes:
    (found,) = end.stats.values()
    return b"".join(np.asarray(value).tobytes() for value in found.as_dict().values())


@cache
def uninterrupted() -> list[bytes | None]:
    """Return the statistics after each number of batches of one stream."""

    async def streams(folder: Path) -> list[bytes | None]:
        async with served(folder, "a", models=Streams.settings["models"]) as server:
            ends = range(1, BATCHES + 1)
            answers = [await server.door.ask(STREAM, *streaming(0, end, None)) for end in ends]
            return [None, *(assembled(0, answer)[1] for answer in answers)]

    with TemporaryDirectory() as folder:
        return run(0, streams(Path(folder)))


class Streams(History):
    """Streams with running statistics, which begin at checkpoints of earlier ones."""

    settings: ClassVar[dict[str, Any]] = {"models": {"plain": custom(Plain, server_calls.SHAPE)}}

    def prepare(self) -> None:
        self.checkpoints: dict[int, bytes | None] = {0: None}

    @rule(after=st.integers(0, BATCHES), count=st.integers(1, BATCHES))
    def stream(self, after: int, count: int) -> None:
        first = max(known for known in self.checkpoints if known <= after and known < BATCHES)
        end = min(first + count, BATCHES)
        self.call((first, end), STREAM, *streaming(first, end, self.checkpoints[first]))

    def answered(self, what: tuple[int, int], call: Call) -> None:
        first, end = what
        assert call.answer.code in ("OK", *LEFT), call.answer
        checkpoints, statistics = assembled(first, call.answer)
        self.checkpoints |= checkpoints
        if call.answer.is_ok:
            assert statistics == uninterrupted()[end]

    @invariant()
    def checkpoints_are_of_whole_batches(self) -> None:
        assert all(0 <= number <= BATCHES for number in getattr(self, "checkpoints", ()))


PLAIN = custom(Plain, server_calls.SHAPE)
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "usual": {"plain": PLAIN},
    "more": {"plain": PLAIN, "third": custom(SteadyNet, server_calls.SHAPE)},
    "other weights": {"plain": {**PLAIN, "weights": "random:3"}},
}


@cache
def values_by_configuration() -> dict[str, bytes]:
    """Return what each configuration answers to one request."""

    async def ask(folder: Path, models: Any) -> bytes:
        async with served(folder, "a", models=models) as server:
            return values_of(await server.door.ask(EXTRACT, asking(0)))

    with TemporaryDirectory() as folder:
        return {
            name: run(0, ask(Path(folder) / str(number), models))
            for number, (name, models) in enumerate(CONFIGURATIONS.items())
        }


class Configuration(History):
    """Reloads and drains, and passes meanwhile."""

    settings: ClassVar[dict[str, Any]] = {
        "models": CONFIGURATIONS["usual"],
        "limits": {"feature_cache_bytes": 1 << 20},
    }

    def prepare(self) -> None:
        self.model = Registers()
        self.model.values = {"configuration": "usual", "drains": False}
        self.wanted = ["usual"]
        lifecycle = self.server.app.lifecycle
        plain = lifecycle.config.model_dump(exclude_unset=True)
        lifecycle.reread = lambda: ServerConfig(**{**plain, "models": CONFIGURATIONS[self.wanted[-1]]})

    @rule(name=st.sampled_from(sorted(CONFIGURATIONS)))
    def reload(self, name: str) -> None:
        self.wanted.append(name)
        self.call("reload", "ServerService/ReloadConfig", server_pb2.ReloadConfigRequest())

    @rule(drains=st.booleans())
    def drain(self, drains: bool) -> None:
        action = server_pb2.DRAIN_ACTION_START if drains else server_pb2.DRAIN_ACTION_UNDO
        self.call(drains, "ServerService/Drain", server_pb2.DrainRequest(action=action))

    @rule()
    def extract(self) -> None:
        self.call("extract", EXTRACT, asking(0))

    @rule(count=turns)
    def cut_off_a_reload(self, count: int) -> None:
        self.reload("other weights")
        self.go_on(count)
        self.cut_off(len(self.open) - 1, is_lost=False)

    def answered(self, what: str | bool, call: Call) -> None:
        code = call.answer.code
        if isinstance(what, bool):
            assert code in ("OK", *LEFT), call.answer
            self.model.note("drains", what, code)
        elif what == "reload":
            assert code in ("OK", *LEFT, "UNAVAILABLE"), call.answer
            for name in self.wanted[1:] if code == "OK" else self.wanted:  # it reads what is wanted by then
                self.model.note("configuration", name, code)
        else:
            assert code in ("OK", *LEFT, "UNAVAILABLE"), call.answer
            if code == "OK":
                names = {*self.wanted, self.model.values["configuration"]}
                assert values_of(call.answer) in [values_by_configuration()[name] for name in names]

    def rested(self) -> None:
        """Compare with what is said, and with what is answered."""
        answer = self.ask("ServerService/Drain", server_pb2.DrainRequest())
        is_draining = server_pb2.DrainResponse.FromString(answer.replies[0]).is_draining
        self.model.see("drains", is_draining)
        models = self.ask("ModelService/ListModels", model_pb2.ListModelsRequest())
        told = model_pb2.ListModelsResponse.FromString(models.replies[0]).models
        given = self.ask(EXTRACT, asking(0))
        assert given.is_ok != is_draining, given
        if given.is_ok:
            seen = (sorted(one.model_id for one in told), values_of(given))
            (name,) = [
                name
                for name, table in CONFIGURATIONS.items()
                if seen == (sorted(table), values_by_configuration()[name])
            ]
            self.model.see("configuration", name)
            self.wanted = [name]
