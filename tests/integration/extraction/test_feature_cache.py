"""The feature cache over the wire: equal questions, equal answers, nobody else's, never old ones."""

import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.support.models import chancy_models as chancy
from tests.support.models.odd_models import Identity, InPlaceOnInput, KeepsState
from tests.support.models.tiny_models import DataDependent, Half, Plain
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.models.writing_models import Counts, Remembers
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt
from tests.support.wire.wire import chunk, extract_call, raw_channel, tensor
from trocar._transport.rpc_errors import error_from_rpc
from trocar_api.reasons import ErrorReason
from trocar_api.v1 import edit_pb2, execution_pb2, tap_pb2
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.statistics_pb2 import STATISTIC_MEAN
from trocar_server.engine.schedule.admission import MethodClass
from trocar_server.rpc.services import extraction_service
from trocar_server.rpc.transfer.messages import send

IMAGE = np.random.default_rng(0).standard_normal((2, 3, 8, 8), np.float32)
ROWS = np.arange(6, dtype=np.float32).reshape(2, 3)
BUDGET = 4 << 20
MODELS = {
    "plain": custom(Plain, (3, 8, 8)),
    "half": custom(Half, (7,)),
    "writes": custom(InPlaceOnInput),
    "branches": custom(DataDependent),
    "wide": custom(Identity, (50_000,)),
    "sometimes": custom(chancy.DrawsOnLargeInputs),
    "trainable": custom(TinyNet, SHAPE),
    **{
        kind.__name__.lower(): custom(kind)
        for kind in (chancy.Draws, chancy.DropsAlways, chancy.DrawsFromNumpy, chancy.CountsCalls)
    },
    "keepsstate": custom(KeepsState, (4,)),
    "counts": custom(Counts, (4,)),
    "remembers": custom(Remembers, (4,)),
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(models=MODELS, device="cpu", limits={"feature_cache_bytes": BUDGET}) as running:
        yield running


@pytest.fixture(autouse=True)
def _empty(server: RunningServer) -> None:
    server.run(lambda: _drop_all(server))


async def _drop_all(server: RunningServer) -> None:
    for model_id in server.engine.deployments:
        server.engine.replies.drop(server.engine.deployment(model_id).version)
    assert server.engine.replies.byte_count == 0


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected


class Caller:
    """Sends messages of protobuf's own making."""

    def __init__(self, server: RunningServer, token: str = "") -> None:
        self._address = server.address
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def __call__(self, *messages: pb.ExtractRequest) -> pb.ExtractResponse:
        """Make one call and return its messages merged, as protobuf merges them."""
        with raw_channel(self._address) as channel:
            call = extract_call(channel, [m.SerializeToString() for m in messages], metadata=self._metadata)
            try:
                return pb.ExtractResponse.FromString(b"".join(call))
            except grpc.RpcError as error:
                raise error_from_rpc(error) from None


@pytest.fixture
def call(server: RunningServer) -> Caller:
    return Caller(server)


def question(
    model_id: str = "plain", array: np.ndarray[Any, Any] = IMAGE, **fields: Any
) -> pb.ExtractRequest:
    fields.setdefault("taps", [tap_pb2.Tap(selector="fc")])
    return pb.ExtractRequest(
        model_id=model_id, inputs=[tensor(array.shape)], chunks=[chunk(array.tobytes())], **fields
    )


def by_digest(request: pb.ExtractRequest, *payloads: bytes) -> pb.ExtractRequest:
    """Return the same question with a digest in place of its payloads."""
    asked = pb.ExtractRequest()
    asked.CopyFrom(request)
    asked.ClearField("chunks")
    given = b"".join(payloads) or b"".join(c.data for c in request.chunks)
    asked.payload_digest = hashlib.sha256(given).digest()
    return asked


def content(reply: pb.ExtractResponse) -> bytes:
    """Return everything that the cache must not change."""
    kept = pb.ExtractResponse()
    kept.CopyFrom(reply)
    kept.ClearField("timing")
    kept.execution.is_cached = False
    return kept.SerializeToString(deterministic=True)


def test_an_equal_question_has_the_very_same_answer_without_a_pass(call: Caller) -> None:
    first, second = call(question()), call(question())
    assert not first.execution.is_cached
    assert second.execution.is_cached
    assert content(second) == content(first)
    assert (second.timing.queue_s, second.timing.compute_s) == (0, 0)
    assert second.HasField("timing")


def test_the_kept_answer_is_what_torch_computes(client: trocar.Client) -> None:
    import torch

    model = rebuilt(Plain)
    with torch.inference_mode():
        expected = model(torch.from_numpy(IMAGE)).numpy()
    for is_cached in (False, True, True):
        maps = client.extract("plain", IMAGE, ["fc"])
        assert maps.is_cached is is_cached
        np.testing.assert_array_equal(maps["fc"], expected)


@pytest.mark.parametrize("is_by_digest", [False, True])
def test_a_kept_answer_is_counted_while_it_is_sent(
    server: RunningServer, call: Caller, monkeypatch: pytest.MonkeyPatch, *, is_by_digest: bool
) -> None:
    reserved = []

    async def counted(*arguments: Any) -> None:
        reserved.append(server.engine.admission.reserved(kind=MethodClass.EXTRACT)[0])
        await send(*arguments)

    wide = np.zeros((4, 50_000), np.float32)
    asked = question("wide", wide, taps=[tap_pb2.Tap(selector="/out")])
    call(asked)
    monkeypatch.setattr(extraction_service, "send", counted)
    assert call(by_digest(asked) if is_by_digest else asked).execution.is_cached
    assert wide.nbytes <= reserved[0] < wide.nbytes * 1.5
    assert server.engine.admission.reserved()[0] == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"taps": [tap_pb2.Tap(selector="conv")]},
        {"taps": [tap_pb2.Tap(selector="fc", alias="head")]},
        {"taps": [tap_pb2.Tap(selector="fc", statistics=[STATISTIC_MEAN])]},
        {"taps": [tap_pb2.Tap(selector="fc"), tap_pb2.Tap(selector="conv")]},
        {"edits": [edit_pb2.Edit(selector="conv", zero=edit_pb2.ZeroEdit())]},
        {"execution": execution_pb2.Execution(numerics=execution_pb2.NUMERICS_FAST)},
        {"execution": execution_pb2.Execution(numerics=execution_pb2.NUMERICS_EXACT)},
        {"execution": execution_pb2.Execution(merge=False)},
    ],
    ids=str,
)
def test_another_question_is_computed(call: Caller, changes: dict[str, Any]) -> None:
    call(question())
    other = call(question(**changes))
    assert not other.execution.is_cached
    assert call(question(**changes)).execution.is_cached
    assert call(question()).execution.is_cached


def test_one_bit_of_the_input_makes_another_question(call: Caller) -> None:
    call(question())
    other = IMAGE.copy()
    other.view(np.uint32)[0, 0, 0, 0] ^= 1
    assert not call(question(array=other)).execution.is_cached


def test_the_same_bytes_in_another_shape_are_another_question(call: Caller) -> None:
    rows = np.arange(12, dtype=np.float32)
    tap = [tap_pb2.Tap(selector="/out")]
    for shape in ((4, 3), (2, 6), (12, 1)):
        assert not call(question("wide", rows.reshape(shape), taps=tap)).execution.is_cached


def test_how_an_answer_travels_and_when_does_not_matter(call: Caller) -> None:
    first = call(question(taps=[tap_pb2.Tap(selector="conv")]))
    ways: list[dict[str, Any]] = [
        {"max_chunk_bytes": 4096},
        {"execution": execution_pb2.Execution(priority=execution_pb2.PRIORITY_LOW)},
        {"execution": execution_pb2.Execution(cache=True)},
    ]
    for changes in ways:
        again = call(question(taps=[tap_pb2.Tap(selector="conv")], **changes))
        assert again.execution.is_cached
        assert values(again) == values(first)


def values(reply: pb.ExtractResponse) -> bytes:
    return b"".join(part.data for part in reply.chunks)


def test_a_kept_answer_comes_in_chunks_of_the_size_asked_for(call: Caller) -> None:
    batch = np.ones((8, 3, 8, 8), np.float32)
    asked = question(array=batch, taps=[tap_pb2.Tap(selector="conv")], max_chunk_bytes=4096)
    first, second = call(asked), call(asked)
    assert [c.offset_bytes for c in second.chunks] == [0, 4096]
    assert content(first) == content(second)


def test_an_impossible_chunk_size_is_refused_for_kept_answers_too(call: Caller) -> None:
    call(question())
    with pytest.raises(trocar.errors.InvalidArgumentError, match="max_chunk_bytes"):
        call(question(max_chunk_bytes=1))
    with pytest.raises(trocar.errors.InvalidArgumentError, match="max_chunk_bytes"):
        call(by_digest(question(max_chunk_bytes=1), IMAGE.tobytes()))


def test_a_request_can_refuse_the_cache(call: Caller, server: RunningServer) -> None:
    refusing = question(execution=execution_pb2.Execution(cache=False))
    call(refusing)
    assert len(server.engine.replies) == 0
    call(question())
    assert not call(refusing).execution.is_cached


def test_a_digest_is_enough_for_what_was_sent_before(call: Caller) -> None:
    first = call(question())
    second = call(by_digest(question()))
    assert second.execution.is_cached
    assert content(second) == content(first)


def test_a_digest_that_is_not_known_is_told_so(call: Caller) -> None:
    with pytest.raises(trocar.errors.NotCachedError) as caught:
        call(by_digest(question()))
    assert caught.value.reason is ErrorReason.NOT_CACHED


@pytest.mark.parametrize("length", [1, 31, 33, 64])
def test_a_digest_of_another_length_is_refused(call: Caller, length: int) -> None:
    asked = by_digest(question())
    asked.payload_digest = b"d" * length
    with pytest.raises(trocar.errors.InvalidArgumentError, match="payload_digest"):
        call(asked)


def test_a_digest_beside_payloads_is_refused_and_poisons_nothing(call: Caller) -> None:
    """Payloads under the digest of others would be kept for whoever asks for those."""
    lying = question(array=np.zeros_like(IMAGE))
    lying.payload_digest = hashlib.sha256(IMAGE.tobytes()).digest()
    with pytest.raises(trocar.errors.InvalidArgumentError, match="payload_digest"):
        call(lying)
    later = question(array=np.zeros_like(IMAGE))
    head = pb.ExtractRequest()
    head.CopyFrom(later)
    head.ClearField("chunks")
    head.payload_digest = lying.payload_digest
    with pytest.raises(trocar.errors.NotCachedError):
        call(head, pb.ExtractRequest(chunks=later.chunks))
    with pytest.raises(trocar.errors.NotCachedError):
        call(by_digest(question()))


def test_digests_cover_all_payloads_in_the_order_of_the_chunks(call: Caller) -> None:
    source = pb.SourceInputs(name="other", inputs=[tensor((2, 3, 8, 8))])
    swap = edit_pb2.Edit(selector="conv", swap=edit_pb2.SwapEdit(source="other"))
    first, second = IMAGE.tobytes(), (IMAGE + 1).tobytes()
    asked = question(edits=[swap], sources=[source])
    del asked.chunks[:]
    asked.chunks.extend([chunk(first), chunk(second, index=1)])
    computed = call(asked)
    assert content(call(by_digest(asked))) == content(computed)
    with pytest.raises(trocar.errors.NotCachedError):
        call(by_digest(asked, second, first))


def test_nobody_hits_on_anothers_answer(server: RunningServer) -> None:
    alice, bob = Caller(server, "alice"), Caller(server, "bob")
    alice(question())
    with pytest.raises(trocar.errors.NotCachedError):
        bob(by_digest(question()))
    assert not bob(question()).execution.is_cached
    assert alice(question()).execution.is_cached
    with pytest.raises(trocar.errors.NotCachedError):
        Caller(server)(by_digest(question()))


def test_a_model_that_was_loaded_again_computes_again(
    call: Caller, client: trocar.Client, server: RunningServer
) -> None:
    call(question())
    client.unload("plain")
    assert len(server.engine.replies) == 0
    with pytest.raises(trocar.errors.ModelNotLoadedError):
        call(question())
    with pytest.raises(trocar.errors.ModelNotLoadedError):
        call(by_digest(question()))
    client.load("plain")
    with pytest.raises(trocar.errors.NotCachedError):
        call(by_digest(question()))
    assert not call(question()).execution.is_cached


@pytest.mark.parametrize("model_id", ["draws", "dropsalways", "drawsfromnumpy", "counts", "remembers"])
def test_what_depends_on_more_than_the_question_is_never_kept(
    call: Caller, server: RunningServer, model_id: str
) -> None:
    rows = np.ones((2, 4 if model_id in ("counts", "remembers") else 3), np.float32)
    asked = question(model_id, rows, taps=[tap_pb2.Tap(selector="/out")])
    for _ in range(3):
        assert not call(asked).execution.is_cached
    assert len(server.engine.replies) == 0


@pytest.mark.parametrize("model_id", ["countscalls", "keepsstate"])
def test_replies_of_a_model_that_writes_to_its_buffers_are_kept(call: Caller, model_id: str) -> None:
    """Each call starts from the buffers as loaded, so equal questions have equal answers."""
    rows = np.ones((2, 4 if model_id == "keepsstate" else 3), np.float32)
    first, second = (call(question(model_id, rows, taps=[tap_pb2.Tap(selector="/out")])) for _ in range(2))
    assert (first.execution.is_cached, second.execution.is_cached) == (False, True)


def test_a_pass_that_drew_random_numbers_is_not_kept_though_others_of_its_model_are(call: Caller) -> None:
    tap = [tap_pb2.Tap(selector="last/in")]
    small, large = question("sometimes", ROWS, taps=tap), question("sometimes", ROWS * 100, taps=tap)
    assert not call(small).execution.is_cached
    assert call(small).execution.is_cached
    first, second = call(large), call(large)
    assert not second.execution.is_cached
    assert values(first) != values(second)


@pytest.mark.parametrize(
    ("model_id", "array", "tap"),
    [
        ("half", np.ones((2, 7), np.float32), "/out"),
        ("writes", ROWS, "identity"),
        ("branches", ROWS, "/out"),
        ("plain", IMAGE, "conv/param(weight)"),
    ],
)
def test_odd_values_are_kept_as_they_were(call: Caller, model_id: str, array: Any, tap: str) -> None:
    asked = question(model_id, array, taps=[tap_pb2.Tap(selector=tap)])
    first = call(asked)
    assert [content(call(asked)) for _ in range(2)] == [content(first)] * 2
    assert call(asked).execution.is_cached


def test_gradients_are_kept_too(client: trocar.Client) -> None:
    found = [client.gradients("plain", IMAGE, of=trocar.logit(1), at="/in") for _ in range(2)]
    assert [maps.is_cached for maps in found] == [False, True]
    assert found[0].objective == found[1].objective
    np.testing.assert_array_equal(found[0]["/in"], found[1]["/in"])


def test_stored_edits_count_by_what_is_in_them(client: trocar.Client) -> None:
    def extract(**options: Any) -> trocar.FeatureMaps:
        return client.extract("plain", IMAGE, ["fc"], edits="mine", **options)

    client.store_edits("plain", "mine", [trocar.edit("conv", "scale", 0.5)])
    first = extract()
    assert extract().is_cached
    client.delete_edits("plain", "mine")
    client.store_edits("plain", "mine", [trocar.edit("conv", "scale", 0.25)])
    other = extract()
    assert not other.is_cached
    assert not np.array_equal(first["fc"], other["fc"])
    client.delete_edits("plain", "mine")
    with pytest.raises(trocar.errors.UnknownEditsError):
        extract()


def test_refused_requests_leave_nothing_behind(call: Caller, server: RunningServer) -> None:
    for _ in range(2):
        with pytest.raises(trocar.errors.UnknownModuleError):
            call(question(taps=[tap_pb2.Tap(selector="none")]))
    assert len(server.engine.replies) == 0


def test_the_cache_stays_within_its_bytes(client: trocar.Client, server: RunningServer) -> None:
    def rows(seed: int) -> np.ndarray[Any, Any]:
        return np.random.default_rng(seed).random((3, 50_000), np.float32)

    sizes = []
    for seed in range(40):
        client.extract("wide", rows(seed), ["/out"])
        sizes.append(server.engine.replies.byte_count)
    assert max(sizes) <= BUDGET < sum([600_000] * 40)
    assert min(sizes) >= 600_000
    assert client.extract("wide", rows(39), ["/out"]).is_cached
    assert not client.extract("wide", rows(0), ["/out"]).is_cached


def test_an_answer_larger_than_the_cache_is_sent_and_not_kept(
    client: trocar.Client, server: RunningServer
) -> None:
    rows = np.ones((3, 400_000), np.float32)
    for _ in range(2):
        maps = client.extract("wide", rows, ["/out"])
        assert not maps.is_cached
        np.testing.assert_array_equal(maps["/out"], rows)
    assert len(server.engine.replies) == 0


def test_large_payloads_are_hashed_and_kept_off_the_event_loop_with_the_same_result(
    client: trocar.Client,
) -> None:
    rows = np.random.default_rng(1).random((3, 100_000), np.float32)
    first, second = (client.extract("wide", rows, ["/out"]) for _ in range(2))
    assert (first.is_cached, second.is_cached) == (False, True)
    np.testing.assert_array_equal(second["/out"], rows)


def test_what_a_caller_does_to_his_arrays_does_not_change_later_answers(client: trocar.Client) -> None:
    first = client.extract("plain", IMAGE, ["fc"])
    expected = first["fc"].copy()
    first["fc"][:] = 0
    np.testing.assert_array_equal(client.extract("plain", IMAGE, ["fc"])["fc"], expected)


def test_the_client_asks_by_digest_and_sends_the_inputs_where_that_does_not_do(
    server: RunningServer,
) -> None:
    with trocar.connect(server.address, options=trocar.options(cache=True)) as client:
        found = [client.extract("plain", IMAGE, ["fc"]) for _ in range(3)]
        assert [maps.is_cached for maps in found] == [False, True, True]
        server.run(lambda: _drop_all(server))
        again = client.extract("plain", IMAGE, ["fc"])
        assert not again.is_cached
        np.testing.assert_array_equal(again["fc"], found[0]["fc"])
        assert not client.extract("plain", IMAGE, ["fc"], options=trocar.options(cache=False)).is_cached


def test_a_trainer_is_never_answered_from_the_cache(client: trocar.Client, server: RunningServer) -> None:
    labels = np.array([0, 1])
    with client.train("trainable", optimizer=trocar.training.sgd(lr=0.5)) as trainer:
        images = IMAGE[:, :, :6, :6]
        before = trainer.extract(images, ["/out"])
        assert not trainer.extract(images, ["/out"]).is_cached
        trainer.step(images, labels)
        after = trainer.extract(images, ["/out"])
    assert not after.is_cached
    assert not np.array_equal(before["/out"], after["/out"])
    assert len(server.engine.replies) == 0


def test_the_limit_is_told_and_off_by_default(client: trocar.Client, serve: Any) -> None:
    assert client.server_info().limits.feature_cache_bytes == BUDGET
    plain = serve(models={"plain": custom(Plain, (3, 8, 8))})
    with trocar.connect(plain.address, options=trocar.options(cache=True)) as other:
        assert other.server_info().limits.feature_cache_bytes == 0
        assert [other.extract("plain", IMAGE, ["fc"]).is_cached for _ in range(4)] == [False] * 4
    with pytest.raises(trocar.errors.NotCachedError):
        Caller(plain)(by_digest(question()))


def test_kept_values_go_through_shared_memory_too(tmp_path: Path) -> None:
    """Large inputs and values on a Unix socket: computed, kept, and placed where the caller wants them."""
    rows = np.random.default_rng(1).random((3, 500_000), np.float32)
    limits = {"feature_cache_bytes": 32 << 20}
    models = {"wide": custom(Identity, (500_000,))}
    with (
        running_server(models=models, device="cpu", limits=limits, host=f"unix:{tmp_path / 's'}") as shared,
        trocar.connect(shared.app.rpc.address, options=trocar.options(cache=True)) as asking,
    ):
        for is_cached in (False, True, True):
            maps = asking.extract("wide", rows, ["/out"])
            assert maps.is_cached is is_cached
            np.testing.assert_array_equal(maps["/out"], rows)
