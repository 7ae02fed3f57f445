"""Parameters of a request: known, ignored, refused."""

from typing import Any

import pytest

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import execution_pb2 as pb
from trocar_server.engine.request.plan import FlagInput
from trocar_server.errors import ServiceError
from trocar_server.rpc.oip.oip_messages import ModelInferRequest
from trocar_server.rpc.oip.request_parameters import check_output_parameters, read_parameters

KINDS = {bool: "bool_param", int: "int64_param", str: "string_param", float: "double_param"}


def parameters(**values: Any) -> Any:
    request = ModelInferRequest()
    for name, value in values.items():
        setattr(request.parameters[name], KINDS[type(value)], value)
    return request.parameters


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("numerics", "exact", pb.Execution(numerics=pb.NUMERICS_EXACT)),
        ("numerics", "bf16", pb.Execution(numerics=pb.NUMERICS_BF16)),
        ("priority", "low", pb.Execution(priority=pb.PRIORITY_LOW)),
        ("priority", 0, pb.Execution()),
        ("priority", 1, pb.Execution(priority=pb.PRIORITY_HIGH)),
        ("priority", 2, pb.Execution(priority=pb.PRIORITY_NORMAL)),
        ("priority", 9, pb.Execution(priority=pb.PRIORITY_LOW)),
        ("merge", False, pb.Execution(merge=False)),
        ("cache", True, pb.Execution(cache=True)),
    ],
)
def test_it_says_how_the_pass_may_be_run(name: str, value: object, expected: pb.Execution) -> None:
    assert read_parameters(parameters(**{name: value})).execution == expected


def test_a_timeout_is_of_microseconds() -> None:
    assert read_parameters(parameters(timeout=1_500_000)).timeout_s == 1.5
    assert read_parameters(parameters(timeout=0)).timeout_s is None
    assert read_parameters(parameters()).timeout_s is None


def test_tritons_client_sends_a_priority_without_a_sign() -> None:
    request = ModelInferRequest()
    request.parameters["priority"].uint64_param = 2**64 - 1
    assert read_parameters(request.parameters).execution.priority == pb.PRIORITY_LOW


def test_what_is_not_known_is_ignored() -> None:
    found = read_parameters(parameters(traceparent="00-1", triton_enable_empty_final_response=True))
    assert (found.execution, found.timeout_s) == (pb.Execution(), None)


def test_flags_of_the_model_are_read_and_the_protocols_own_names_stay_its() -> None:
    given = parameters(negate=True, times=3, mode="wide", merge=False, other=2)
    found = read_parameters(given, ["negate", "times", "mode", "merge", "absent"])
    assert found.flags == (FlagInput("negate", True), FlagInput("times", 3), FlagInput("mode", "wide"))
    assert found.execution == pb.Execution(merge=False)


@pytest.mark.parametrize("value", [0.5, "a" * 1025])
def test_a_flag_of_another_kind_is_refused(value: object) -> None:
    with pytest.raises(ServiceError, match="must be true or false"):
        read_parameters(parameters(times=value), ["times"])


def test_a_sequence_of_nothing_is_none() -> None:
    assert read_parameters(parameters(sequence_id=0, sequence_start=False)).timeout_s is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("numerics", "double"),
        ("numerics", 1),
        ("priority", "urgent"),
        ("priority", -1),
        ("priority", True),
        ("priority", 1.5),
        ("merge", "yes"),
        ("cache", 1),
        ("timeout", -1),
        ("timeout", "soon"),
        ("timeout", True),
        ("timeout", float("nan")),
        ("timeout", float("inf")),
        ("timeout", 2**62),
        ("sequence_id", 7),
        ("sequence_id", "a"),
        ("sequence_start", True),
        ("edits", "mine"),
        ("start_at", "layer3"),
    ],
)
def test_what_would_change_results_unseen_is_refused(name: str, value: object) -> None:
    with pytest.raises(ServiceError) as caught:
        read_parameters(parameters(**{name: value}))
    assert caught.value.reason is ErrorReason.INVALID_ARGUMENT
    assert caught.value.details["field"] == f"parameters['{name}']"


@pytest.mark.parametrize("name", ["shared_memory_region", "shared_memory_byte_size", "classification"])
def test_an_output_that_goes_elsewhere_is_not_offered(name: str) -> None:
    with pytest.raises(ServiceError) as caught:
        check_output_parameters("outputs[0].parameters", parameters(**{name: 5}))
    assert caught.value.reason is ErrorReason.UNIMPLEMENTED


def test_no_classes_are_none() -> None:
    check_output_parameters("outputs[0].parameters", parameters(classification=0, binary_data=True))
