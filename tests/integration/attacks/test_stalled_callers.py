"""Callers who announce inputs and do not send them, or send them bit by bit: nobody else waits for them."""

import queue
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models.gated_models import WAIT_S
from tests.support.models.odd_models import Identity
from tests.support.models.tiny_models import Plain
from tests.support.servers.running_server import RunningServer
from tests.support.servers.serving import Serve, custom
from tests.support.wire.wire import EXTRACT, chunk, raw_channel, request, tensor
from trocar._transport.attempts import Attempts
from trocar._transport.rpc_errors import error_from_rpc
from trocar_api.v1 import dataset_pb2, extraction_pb2, stream_pb2, tap_pb2, trainer_pb2
from trocar_server.engine.schedule.admission import MethodClass

STREAM = "/trocar_api.v1.StreamService/ExtractStream"
TRAIN = "/trocar_api.v1.TrainerService/Train"
UPLOAD = "/trocar_api.v1.DatasetService/UploadShard"
ADAPTER = "/trocar_api.v1.TrainerService/LoadAdapter"
PENDING_BYTES = 8 << 20
ROWS = 100_000
"""Of 3 float32 each: eight such calls announce more than all callers may have at once."""
MODELS = {"identity": custom(Identity), "plain": custom(Plain, (3, 8, 8))}
LIMITS = {"max_pending_bytes": PENDING_BYTES, "max_principal_bytes": PENDING_BYTES, "max_batch": 1 << 20}
SOON_S = 30.0
"""Before the server gives up the others, after 60 s; a busy machine needs some of it."""
IMAGES = np.zeros((4, 3, 8, 8), np.float32)
END = None


class Slow:
    """One call whose messages are sent by hand; closed with its channel."""

    def __init__(self, address: str, path: str, name: str, *messages: bytes) -> None:
        self._messages: queue.Queue[bytes | None] = queue.Queue()
        self._channel = grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)])
        method: Any = self._channel.stream_stream(path, None, None)
        metadata = (("authorization", f"Bearer {name}"),)
        self.call = method(iter(self._messages.get, END), timeout=WAIT_S, metadata=metadata)
        for message in messages:
            self.send(message)

    def send(self, message: bytes | None) -> None:
        self._messages.put(message)

    def close(self) -> None:
        self.call.cancel()
        self.send(END)
        self._channel.close()


def announced(rows: int = ROWS, **fields: Any) -> bytes:
    fields.setdefault("chunks", [])
    return request(inputs=[tensor((rows, 3))], **fields).SerializeToString()


def stream_start() -> bytes:
    start = stream_pb2.ExtractStreamStart(model_id="identity", taps=[tap_pb2.Tap(selector="identity")])
    return stream_pb2.ExtractStreamRequest(start=start).SerializeToString()


def stream_batch(rows: int = ROWS, data: bytes = b"") -> bytes:
    batch = stream_pb2.StreamBatch(batch_index=0, inputs=[tensor((rows, 3))])
    chunks = [chunk(data)] if data else []
    return stream_pb2.ExtractStreamRequest(batch=batch, chunks=chunks).SerializeToString()


@contextmanager
def callers(address: str, path: str, messages: list[bytes], count: int = 8) -> Iterator[list[Slow]]:
    with ExitStack() as stack:
        found = [Slow(address, path, f"caller {number}", *messages) for number in range(count)]
        for caller in found:
            stack.callback(caller.close)
        yield found


def has_calls(running: RunningServer, kind: MethodClass, count: int) -> bool:
    """Look until so many calls of a class are admitted; each look is a turn of the server's own loop."""

    async def look() -> bool:
        return running.engine.admission.reserved(kind=kind)[2] >= count

    return any(running.run(look) for _ in range(100_000))


def status_of(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.RpcError):
        list(call)
    return call.code(), call.details()


@pytest.mark.parametrize(
    ("path", "messages", "kind"),
    [
        (EXTRACT, [announced()], MethodClass.EXTRACT),
        (STREAM, [stream_start(), stream_batch()], MethodClass.STREAM),
    ],
)
def test_another_is_served_while_eight_announce_and_wait(
    serve: Serve, path: str, messages: list[bytes], kind: MethodClass
) -> None:
    running = serve(models=MODELS, limits=LIMITS)
    with callers(running.address, path, messages), trocar.connect(running.address, retries=0) as other:
        assert has_calls(running, kind, 8)
        maps = other.extract("plain", IMAGES, taps="fc", options=trocar.options(timeout_s=SOON_S))
        assert maps["fc"].shape[0] == len(IMAGES)
        assert running.engine.admission.reserved(kind=kind)[0] < PENDING_BYTES // 8


def test_another_trains_while_eight_announce_and_wait(serve: Serve) -> None:
    limits = {**LIMITS, "max_pending_bytes": 1 << 20}
    running = serve(models=MODELS, limits=limits)
    shape = (600, 3, 8, 8)  # 460 kB; of the class of training there are 512 KiB
    with ExitStack() as stack:
        for number in range(8):
            own = stack.enter_context(trocar.connect(running.address, token=f"caller {number}"))
            trainer = own.train("plain", trainable=["fc"])
            head = trainer_pb2.TrainRequest(
                trainer_id=trainer.trainer_id,
                kind=trainer_pb2.TRAIN_KIND_STEP,
                number=0,
                inputs=[tensor(shape)],
            )
            slow = Slow(running.address, TRAIN, f"caller {number}", head.SerializeToString())
            stack.callback(slow.close)
        assert has_calls(running, MethodClass.TRAIN, 8)
        other = stack.enter_context(trocar.connect(running.address, token="other", retries=0))
        trainer = other.train("plain", trainable=["fc"])
        result = trainer.step(np.zeros(shape, np.float32), np.zeros(shape[0], np.int64), timeout_s=SOON_S)
        assert np.isfinite(result.loss)


SHORT = {"receive_timeout_s": 0.5, "stall_timeout_s": 1.0}


@pytest.mark.parametrize(
    ("path", "messages"),
    [
        (EXTRACT, []),
        (EXTRACT, [announced()]),
        (EXTRACT, [announced(chunks=[chunk(bytes(100))])]),
        (STREAM, []),
        (STREAM, [stream_start()]),
        (STREAM, [stream_start(), stream_batch()]),
        (STREAM, [stream_start(), stream_batch(data=bytes(100))]),
        (TRAIN, []),
        (UPLOAD, []),
        (ADAPTER, []),
    ],
)
def test_who_sends_no_more_is_refused(serve: Serve, path: str, messages: list[bytes]) -> None:
    running = serve(models=MODELS, limits={**LIMITS, **SHORT})
    with callers(running.address, path, messages, 1) as (caller,):
        code, text = status_of(caller.call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "0.5 s" in text or "1 s" in text


def test_an_upload_that_stops_is_refused(serve: Serve) -> None:
    running = serve(models=MODELS, limits=SHORT)
    with raw_channel(running.address) as channel:
        manifest = dataset_pb2.DatasetManifest(
            name="stalled",
            sample_count=1,
            shards=[dataset_pb2.DatasetShard(sha256="0" * 64, byte_count=1000, sample_count=1)],
        )
        begin: Any = channel.unary_unary("/trocar_api.v1.DatasetService/BeginUpload", None, None)
        begun = begin(
            dataset_pb2.BeginUploadRequest(manifest=manifest).SerializeToString(),
            timeout=WAIT_S,
            metadata=(("authorization", "Bearer caller 0"),),
        )
        dataset_id = dataset_pb2.BeginUploadResponse.FromString(begun).dataset_id
    first = dataset_pb2.UploadShardRequest(dataset_id=dataset_id, sha256="0" * 64, data=bytes(10))
    with callers(running.address, UPLOAD, [first.SerializeToString()], 1) as (caller,):
        code, _ = status_of(caller.call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED


def test_who_sends_single_bytes_is_refused(serve: Serve) -> None:
    running = serve(models=MODELS, limits={**LIMITS, **SHORT})
    with callers(running.address, EXTRACT, [announced()], 1) as (caller,):
        offset = 0
        while (
            caller.call.is_active()
        ):  # as fast as the loop takes them: far below the least rate all the same
            caller.send(announced_chunk(offset))
            offset += 1
            running.run(_turn)
        code, _ = status_of(caller.call)
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert running.engine.admission.reserved()[0] == 0


def announced_chunk(offset: int) -> bytes:
    return extraction_pb2.ExtractRequest(chunks=[chunk(b"\0", offset=offset)]).SerializeToString()


async def _turn() -> None:
    """One turn of the server's loop."""


def test_the_client_says_what_happened_and_does_not_try_again(serve: Serve) -> None:
    running = serve(models=MODELS, limits={**LIMITS, **SHORT})
    with (
        callers(running.address, EXTRACT, [announced()], 1) as (caller,),
        pytest.raises(grpc.RpcError) as caught,
    ):
        list(caller.call)
    problem = error_from_rpc(caught.value)
    assert isinstance(problem, trocar.errors.DeadlineExceededError)
    assert Attempts(4, 60.0).pause_after(problem, caught.value) is None
