"""Whatever a message of the Open Inference Protocol says, the answer is a reply or an error with a reason."""

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.files.scale import count
from tests.support.oracles.oracle import noise
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer
from tests.support.wire.open_inference import infer, info_of, request_of, stream
from tests.support.wire.wire import raw_channel
from trocar_server.rpc.oip.oip_messages import ModelInferRequest
from trocar_server.tensors.stats import Scope, Statistic

EXAMPLES = count(300, "TROCAR_FUZZ_EXAMPLES")
_INT64 = st.integers(-(2**63), 2**63 - 1)
_TEXT = st.text(st.characters(codec="utf-8"), max_size=12)
_SELECTORS = st.sampled_from(
    [
        "/out",
        "conv",
        "relu@*",
        "relu",
        "unused",
        "fc/in",
        "**",
        "*:Conv2d",
        "both",
        "split[1]",
        "fc/param(*)",
        "x[",
    ]
)
_NAMES = st.one_of(
    _SELECTORS,
    st.builds("{}:{}".format, _SELECTORS, st.sampled_from(list(Statistic))),
    st.builds("{}:{}:{}".format, _SELECTORS, st.sampled_from(list(Statistic)), st.sampled_from(list(Scope))),
    _TEXT,
)
_SHAPES = st.sampled_from([(1, 3), (2, 3), (2, 3, 8, 8), (1, 4, 8, 8), (), (3,), (0, 3), (1, 0)]) | st.lists(
    _INT64, max_size=10
)
_DATATYPES = (
    st.sampled_from(["FP32", "FP32", "FP64", "FP16", "BF16", "BOOL", "INT8", "UINT64", "BYTES"]) | _TEXT
)
_CONTENTS = st.fixed_dictionaries(
    {},
    optional={
        "bool_contents": st.lists(st.booleans(), max_size=6),
        "int_contents": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
        "uint64_contents": st.lists(st.integers(0, 2**64 - 1), max_size=6),
        "fp32_contents": st.lists(st.floats(width=32), max_size=6),
        "bytes_contents": st.lists(st.binary(max_size=9), max_size=3),
    },
)
_PARAMETER: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.fixed_dictionaries({"int64_param": _INT64}),
    st.fixed_dictionaries({"string_param": _TEXT | st.sampled_from(["fast", "exact", "low"])}),
    st.fixed_dictionaries({"double_param": st.floats()}),
    st.fixed_dictionaries({"bool_param": st.booleans()}),
    st.just({}),
)
_PARAMETERS = st.dictionaries(
    st.sampled_from(
        ["numerics", "priority", "timeout", "sequence_id", "merge", "edits", "shared_memory_region"]
    )
    | _TEXT,
    _PARAMETER,
    max_size=2,
)
_INPUT = st.fixed_dictionaries(
    {
        "name": st.sampled_from(["x", "x", "bias", "self", ""]) | _TEXT,
        "datatype": _DATATYPES,
        "shape": _SHAPES,
    },
    optional={"parameters": _PARAMETERS, "contents": _CONTENTS},
)
_REQUESTS = st.fixed_dictionaries(
    {"model_name": st.sampled_from(["plain", "structured", "structured", "data-dependent"]) | _TEXT},
    optional={
        "model_version": st.sampled_from(["", "1"]) | _TEXT,
        "id": _TEXT,
        "parameters": _PARAMETERS,
        "inputs": st.lists(_INPUT, max_size=2),
        "outputs": st.lists(
            st.fixed_dictionaries({"name": _NAMES}, optional={"parameters": _PARAMETERS}), max_size=3
        ),
        "raw_input_contents": st.lists(
            st.sampled_from([bytes(12), bytes(24), b""]) | st.binary(max_size=40), max_size=2
        ),
    },
).map(lambda fields: ModelInferRequest(**fields))

few = settings(
    max_examples=EXAMPLES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture
def channel(server: RunningServer) -> Iterator[grpc.Channel]:
    """The server answers afterwards as before, and no hook is left."""
    good = request_of("plain", {"x": noise(2, 3, 8, 8)})
    with raw_channel(server.address) as opened:
        expected = infer(opened, good).raw_output_contents
        hooks = hook_counts(server)
        yield opened
        assert infer(opened, good).raw_output_contents == expected
        assert hook_counts(server) == hooks


@few
@given(request_=_REQUESTS)
def test_a_request_is_answered_or_refused_with_a_reason(channel: grpc.Channel, request_: Any) -> None:
    try:
        response = infer(channel, request_)
    except grpc.RpcError as error:
        found: Any = error
        assert found.code() not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), found.details()
        assert info_of(found).reason not in ("", "INTERNAL")
    else:
        assert len(response.outputs) == len(response.raw_output_contents)


@few
@given(request_=_REQUESTS)
def test_a_stream_says_the_same(channel: grpc.Channel, request_: Any) -> None:
    good = request_of("plain", {"x": noise(1, 3, 8, 8)})
    answer, last = stream(channel, [request_, good])
    assert answer.infer_response.id == request_.id
    assert not last.error_message
    if answer.error_message:
        assert answer.infer_response.parameters["reason"].string_param not in ("", "INTERNAL")
