"""Inference outputs: the requested names, resolved to taps, and their values.

An output is named by a selector, or by a selector, a statistic and perhaps a scope: `layer4`,
`layer4:mean`, `layer4:mean:channel`. An output with a single value is returned under the requested name,
those of a pattern under the names of the values: `layer*:mean` as `layer1:mean`, `layer2:mean`.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import tap_pb2
from trocar_server.config import Limits
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, invalid, named
from trocar_server.rpc.codec.selector_parts import selector_from_text
from trocar_server.rpc.codec.statistics import SCOPES, STATISTICS
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.oip.datatypes import Datatype, datatype_named, datatype_of
from trocar_server.rpc.oip.oip_messages import ModelInferResponse
from trocar_server.rpc.oip.request_parameters import check_output_parameters
from trocar_server.tensors.stats import Scope, Statistic

WHOLE_OUTPUT = "/out"
"""The selector of the model's own output."""

_NOT_ONE_NUMBER = (Statistic.QUANTILES, Statistic.HISTOGRAM, Statistic.COVARIANCE)
_WIRE_STATISTICS: dict[str, Any] = {str(ours): wire for wire, ours in STATISTICS.items()}
_WIRE_SCOPES: dict[str, Any] = {str(ours): wire for wire, ours in SCOPES.items() if wire}
_NAME = re.compile(
    rf"(?P<selector>.*):(?P<statistic>{'|'.join(_WIRE_STATISTICS)})(?::(?P<scope>{'|'.join(_WIRE_SCOPES)}))?",
    re.DOTALL,
)

_MOST_REPLY_BYTES = (1 << 31) - (1 << 20)
"""gRPC's clients and protobuf take less than 2 GiB in one message."""


@dataclass(frozen=True)
class Wanted:
    """One requested output.

    Attributes:
        name: As in the request.
        selector: Selects values of the model.
        statistic: The statistic of these values; None for the values themselves.
        scope: The scope of the statistic.
    """

    name: str
    selector: str
    statistic: Statistic | None = None
    scope: Scope = Scope.ALL

    @property
    def ending(self) -> str:
        """Suffix of the name after the selector."""
        return self.name[len(self.selector) :]


@dataclass(frozen=True)
class Tapped:
    """One tap, and the suffix that the engine adds to the names of its values."""

    message: tap_pb2.Tap
    suffix: str


@dataclass(frozen=True)
class Taps:
    """Taps for the outputs of a request.

    Attributes:
        wanted: The outputs.
        tapped: The taps that provide them.
        places: The tap index of each output.
    """

    wanted: tuple[Wanted, ...]
    tapped: tuple[Tapped, ...]
    places: tuple[int, ...]


def read_outputs(request: Any, limits: Limits) -> Taps:
    """Requested outputs; the model's own output by default.

    Raises:
        ServiceError: With the field named.
    """
    if len(request.outputs) > limits.max_taps:
        raise invalid("outputs", f"{len(request.outputs)} given; at most {limits.max_taps} are allowed")
    wanted = tuple(_wanted(f"outputs[{index}]", entry) for index, entry in enumerate(request.outputs))
    for index, one in enumerate(wanted):
        if one.name in (other.name for other in wanted[:index]):
            raise invalid(f"outputs[{index}].name", f"'{one.name}' is asked for twice")
    return _tapped(wanted or (Wanted(WHOLE_OUTPUT, WHOLE_OUTPUT),))


def _wanted(field: str, entry: Any) -> Wanted:
    check_output_parameters(f"{field}.parameters", entry.parameters)
    if len(entry.name) > MAX_TEXT_CHARACTERS:
        raise invalid(f"{field}.name", f"over {MAX_TEXT_CHARACTERS} characters")
    match = _NAME.fullmatch(entry.name)
    wanted = Wanted(entry.name, entry.name)
    if match:
        scope = Scope(match["scope"] or Scope.ALL)
        wanted = Wanted(entry.name, match["selector"], Statistic(match["statistic"]), scope)
    if wanted.statistic in _NOT_ONE_NUMBER:
        raise invalid(
            f"{field}.name", f"{wanted.statistic} has more than numbers; use Trocar's own client for it"
        )
    if wanted.statistic is Statistic.ARGMAX_CHANNEL and wanted.scope is Scope.CHANNEL:
        raise invalid(f"{field}.name", "argmax_channel is taken over all or over each sample")
    with named(f"{field}.name"):
        selector_from_text(f"{field}.name", wanted.selector)
    return wanted


def _tapped(wanted: tuple[Wanted, ...]) -> Taps:
    """Tap each selector once per scope; a value is collected with the first."""
    messages: dict[tuple[str, Scope], tap_pb2.Tap] = {}
    places: dict[Wanted, tuple[str, Scope]] = {}
    for one in sorted(wanted, key=lambda one: one.statistic is None):
        known = next((key for key in messages if key[0] == one.selector), None)
        key = known if known and one.statistic is None else (one.selector, one.scope)
        message = messages.setdefault(
            key, tap_pb2.Tap(selector=one.selector, values=False, scope=_WIRE_SCOPES[one.scope])
        )
        if one.statistic is None:
            message.values = True
        else:
            message.statistics.append(_WIRE_STATISTICS[one.statistic])
        places[one] = key
    order = list(messages)
    taps = tuple(Tapped(message, _suffix(index, messages)) for index, message in enumerate(messages.values()))
    return Taps(wanted, taps, tuple(order.index(places[one]) for one in wanted))


def _suffix(index: int, messages: Mapping[Any, tap_pb2.Tap]) -> str:
    """Suffix that separates taps with statistics from other taps of the same value."""
    has_statistics = bool(list(messages.values())[index].statistics)
    return f" (statistics {index})" if has_statistics and len(messages) > 1 else ""


def write_outputs(response: Any, taps: Taps, extraction: Extraction) -> list[memoryview]:
    """Describe the outputs of a pass, and return the bytes of each.

    Args:
        response: The `ModelInferResponse` that gets the descriptions.
        taps: The requested outputs.
        extraction: The collected values.

    Raises:
        ServiceError: `NOT_A_TENSOR` for complex numbers, `REPLY_TOO_LARGE` for more than gRPC takes.
    """
    result = {entry.output.name: entry for entry in extraction.feature_maps}
    outputs: dict[str, tuple[Any, memoryview]] = {}
    for one, place in zip(taps.wanted, taps.places, strict=True):
        suffix = taps.tapped[place].suffix
        for name, entry in _of_tap(one, suffix, extraction.expansions[place], result):
            if name not in outputs:  # a pattern may match an output that is also requested by name
                outputs[name] = _output(name, one, entry)
    response.outputs.extend(output for output, _ in outputs.values())
    payloads = [payload for _, payload in outputs.values()]
    total = sum(payload.nbytes for payload in payloads)
    if total > _MOST_REPLY_BYTES:
        raise ServiceError(
            ErrorReason.REPLY_TOO_LARGE,
            f"the outputs are {total:,} bytes, one message takes {_MOST_REPLY_BYTES:,}; send a smaller batch",
        )
    return payloads


def _of_tap(
    one: Wanted, suffix: str, names: Sequence[str], outcome: Mapping[str, FeatureMap]
) -> Iterator[tuple[str, FeatureMap]]:
    for name in names:
        yield (one.name if len(names) == 1 else name.removesuffix(suffix) + one.ending), outcome[name]


def _output(name: str, one: Wanted, entry: FeatureMap) -> tuple[Any, memoryview]:
    if one.statistic is not None and entry.statistics is not None:
        numbers = np.array(entry.statistics.values[one.statistic], np.float64)
        return _described(name, datatype_named("", "FP64"), numbers.shape), numbers.view(np.uint8).data
    datatype = datatype_of(entry.output.dtype)
    if datatype is None or entry.values is None:
        raise ServiceError(
            ErrorReason.NOT_A_TENSOR,
            f"'{name}' is {str(entry.output.dtype).removeprefix('torch.')}, which this protocol has not; "
            "ask for a statistic of it, or use Trocar's own client",
            name=name,
        )
    return _described(name, datatype, entry.output.shape), entry.values.data


def _described(name: str, datatype: Datatype, shape: Sequence[int]) -> Any:
    return ModelInferResponse.InferOutputTensor(name=sendable(name), datatype=datatype.name, shape=shape)
