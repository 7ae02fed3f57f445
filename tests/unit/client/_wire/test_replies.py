from collections.abc import Iterator
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import trocar
from tests.unit.client.fake_server import DTYPES, chunks, feature_map, reply, reply_head
from trocar._wire.replies import LastReply, ReplyAssembler
from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1 import statistics_pb2
from trocar_api.v1.tensor_pb2 import DTYPE_BFLOAT16, DTYPE_FLOAT32, Dtype, TensorChunk, TensorSpec

ARRAY = np.arange(24, dtype=np.float32).reshape(2, 3, 4)


def assembled(messages: Iterator[bytes] | list[bytes], **options: Any) -> trocar.FeatureMaps:
    assembler = ReplyAssembler("resnet18", **options)
    for message in messages:
        assembler.feed(message)
    return assembler.finish()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (2, 3, 5)])
@pytest.mark.parametrize("chunk_bytes", [7, 1 << 20])
def test_every_dtype_and_shape_arrives(dtype: str, shape: tuple[int, ...], chunk_bytes: int) -> None:
    array = np.asarray(np.random.default_rng(0).integers(0, 2, shape)).astype(dtype)
    maps = assembled(reply({"x": array}, chunk_bytes=chunk_bytes))
    assert maps["x"].dtype == array.dtype
    assert maps["x"].flags.writeable
    np.testing.assert_array_equal(maps["x"], array)


@given(bits=st.lists(st.integers(0, 65535), min_size=1, max_size=50), chunk_bytes=st.integers(1, 9))
def test_bfloat16_becomes_float32_exactly(bits: list[int], chunk_bytes: int) -> None:
    array = np.array(bits, np.uint16)
    spec = TensorSpec(dtype=DTYPE_BFLOAT16, shape=array.shape)
    entry = pb.FeatureMap(name="x", tensor=spec, byte_count=array.nbytes, has_values=True)
    head = pb.ExtractResponse(feature_maps=[entry]).SerializeToString()
    maps = assembled([head, *chunks([array.tobytes()], chunk_bytes)])
    assert maps["x"].dtype == np.float32
    assert maps.info["x"].dtype == "bfloat16"
    np.testing.assert_array_equal(maps["x"].view(np.uint32), array.astype(np.uint32) << 16)


def test_all_may_come_in_one_message() -> None:
    maps = assembled([b"".join(reply({"x": ARRAY, "y": ARRAY[0]}, chunk_bytes=5))])
    np.testing.assert_array_equal(maps["x"], ARRAY)
    np.testing.assert_array_equal(maps["y"], ARRAY[0])


def one_message(array: Any, **changes: Any) -> bytes:
    head = reply_head({"x": array})
    head.MergeFrom(pb.ExtractResponse(**changes))
    return head.SerializeToString() + b"".join(chunks([array.tobytes()], 1 << 20))


def test_replies_of_a_known_layout_say_what_they_would_say_alone() -> None:
    statistic = pb.FeatureMap(name="s", scope=statistics_pb2.STATISTIC_SCOPE_ALL)
    statistic.statistics.add(statistic=statistics_pb2.STATISTIC_MEAN, values=[1.5])
    replies = [
        one_message(ARRAY),
        one_message(ARRAY + 1, timing=pb.ServerTiming(queue_s=3.0, compute_s=4.0)),
        one_message(ARRAY, stopped_at="layer3"),
        one_message(ARRAY[:1]),
        one_message(ARRAY.astype(np.int32)),
        one_message(ARRAY, feature_maps=[statistic]),
        one_message(ARRAY, feature_maps=[statistic]),
        one_message(ARRAY, objective_value=2.0),
        one_message(ARRAY, objective_value=3.0),
        one_message(ARRAY),
        one_message(ARRAY * 2),
    ]
    last = LastReply()
    for message in replies:
        found, alone = assembled([message], last=last), assembled([message])
        assert (found["x"].dtype, found["x"].flags.writeable) == (alone["x"].dtype, True)
        np.testing.assert_array_equal(found["x"], alone["x"])
        for name in ("info", "expansions", "timing", "stopped_at", "model_id", "objective", "execution"):
            assert getattr(found, name) == getattr(alone, name)
        assert found.stats.keys() == alone.stats.keys()
    assert last.known is not None


def test_a_reply_of_a_known_layout_is_not_added_to() -> None:
    last, rest = LastReply(), next(chunks([b"ab"], 2))
    assembled([one_message(ARRAY)], last=last)
    for messages in ([one_message(ARRAY), rest], [one_message(ARRAY), one_message(ARRAY)]):
        with pytest.raises(trocar.BadReplyError, match="more bytes"):
            assembled(messages, last=last)


def test_a_retried_call_begins_anew_with_a_known_layout() -> None:
    last = LastReply()
    assembled([one_message(ARRAY)], last=last)
    assembler = ReplyAssembler("resnet18", last=last)
    assembler.feed(one_message(ARRAY))
    assembler.restart()
    assembler.feed(one_message(ARRAY + 1))
    np.testing.assert_array_equal(assembler.finish()["x"], ARRAY + 1)


def test_arrays_of_the_caller_are_filled_by_replies_of_a_known_layout() -> None:
    last, out = LastReply(), np.empty_like(ARRAY)
    assembled([one_message(ARRAY)], last=last)
    assert assembled([one_message(ARRAY + 1)], last=last, out={"x": out})["x"] is out
    np.testing.assert_array_equal(out, ARRAY + 1)


def test_a_map_without_values_takes_no_payload() -> None:
    head = reply_head({"x": ARRAY})
    entry = feature_map("s", ARRAY, byte_count=0, has_values=False)
    entry.statistics.add(statistic=statistics_pb2.STATISTIC_MEAN, values=[11.5])
    head.feature_maps.insert(0, entry)
    maps = assembled([head.SerializeToString(), *chunks([ARRAY.tobytes()], 50)])
    assert list(maps) == ["x"]
    assert maps.stats["s"].mean == 11.5
    assert maps.info["s"].shape == (2, 3, 4)
    with pytest.raises(KeyError, match="values=False"):
        maps["s"]


def test_statistics_over_channels_are_arrays() -> None:
    entry = feature_map("s", ARRAY, byte_count=0, has_values=False)
    entry.statistics.add(statistic=statistics_pb2.STATISTIC_NAN_COUNT, values=[0, 2])
    entry.scope, entry.channel_dim = statistics_pb2.STATISTIC_SCOPE_CHANNEL, 1
    stats = assembled([pb.ExtractResponse(feature_maps=[entry]).SerializeToString()]).stats["s"]
    np.testing.assert_array_equal(stats.nan_count, [0.0, 2.0])
    assert (stats.over, stats.channel_dim) == ("channel", 1)


def test_counts_over_all_are_ints() -> None:
    entry = feature_map("s", ARRAY, byte_count=0, has_values=False)
    entry.statistics.add(statistic=statistics_pb2.STATISTIC_INF_COUNT, values=[3])
    stats = assembled([pb.ExtractResponse(feature_maps=[entry]).SerializeToString()]).stats["s"]
    assert isinstance(stats.inf_count, int)


def _chunk(index: int, offset: int, data: bytes) -> bytes:
    chunk = TensorChunk(payload_index=index, offset_bytes=offset, data=data)
    return pb.ExtractResponse(chunks=[chunk]).SerializeToString()


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([], "empty"),
        ([b"\xff"], "cannot be decoded"),
        ([_chunk(0, 4, b"abcd")], "out of order"),
        ([_chunk(1, 0, b"abcd")], "out of order"),
        ([_chunk(0, 0, bytes(97))], "more bytes for 'x'"),
        ([_chunk(0, 0, bytes(96)), _chunk(1, 0, b"a")], "more bytes than it announced"),
        ([_chunk(0, 0, bytes(95))], "1 of 96 bytes of 'x' are missing"),
        ([_chunk(0, 0, bytes(48)), _chunk(0, 0, bytes(48))], "out of order"),
    ],
)
def test_replies_that_break_the_contract_are_refused(messages: list[bytes], expected: str) -> None:
    head = [reply_head({"x": ARRAY}).SerializeToString()] if expected != "empty" else []
    with pytest.raises(trocar.BadReplyError, match=expected):
        assembled([*head, *messages])


@pytest.mark.parametrize(
    "fields",
    [
        {"byte_count": 95},
        {"tensor": TensorSpec(dtype=DTYPE_FLOAT32, shape=[-1])},
        {"tensor": TensorSpec(dtype=DTYPE_FLOAT32, shape=[1] * 9), "byte_count": 4},
        {"tensor": TensorSpec(dtype=cast(Dtype.ValueType, 99), shape=[24])},
        {"tensor": TensorSpec(dtype=DTYPE_FLOAT32, shape=[0, 2**62]), "byte_count": 0},
    ],
)
def test_impossible_feature_maps_are_refused(fields: dict[str, Any]) -> None:
    entry = feature_map("x", ARRAY, **fields)
    with pytest.raises(trocar.BadReplyError):
        assembled([pb.ExtractResponse(feature_maps=[entry]).SerializeToString()])


def test_two_maps_of_one_name_are_refused() -> None:
    head = reply_head({"x": ARRAY})
    head.feature_maps.append(head.feature_maps[0])
    with pytest.raises(trocar.BadReplyError, match="same name"):
        assembled([head.SerializeToString()])


@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_bytes_are_a_reply_or_refused(first: bytes, second: bytes) -> None:
    try:
        assembled([first, second])
    except trocar.BadReplyError:
        return


@pytest.mark.parametrize(
    "mine",
    [
        np.zeros((2, 3, 4), np.float64),
        np.zeros((24,), np.float32),
        np.zeros((4, 3, 2), np.float32).T,
        np.frombuffer(bytes(96), np.float32).reshape(2, 3, 4),
    ],
)
def test_out_arrays_that_do_not_fit_are_refused(mine: np.ndarray[Any, Any]) -> None:
    with pytest.raises(ValueError, match=r"out\['x'\] must be a writable C-contiguous float32 array"):
        assembled(reply({"x": ARRAY}), out={"x": mine})


def test_out_names_that_are_not_in_the_reply_are_refused() -> None:
    with pytest.raises(ValueError, match="out has y, but the reply has x"):
        assembled(reply({"x": ARRAY}), out={"y": np.zeros_like(ARRAY)})


def test_one_selector_of_two_taps_stands_for_both_names() -> None:
    head = reply_head({"a": ARRAY, "b": ARRAY})
    head.expansions[0].selector = head.expansions[1].selector = "layer4"
    maps = assembled([head.SerializeToString(), *chunks([ARRAY.tobytes()] * 2, 1000)])
    assert maps.expansions == {"layer4": ("a", "b")}
