"""From an extraction to the messages of its reply."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.reduction_pb2 import CastResult
from trocar_api.wire import split_payload
from trocar_server.engine.outcome import Extraction
from trocar_server.engine.outputs import Output
from trocar_server.engine.passes import FeatureMap
from trocar_server.engine.plan import Plan
from trocar_server.reductions import CastValue
from trocar_server.rpc.dtypes import spec_to_wire, to_wire
from trocar_server.rpc.execution import report_to_wire
from trocar_server.rpc.statistics import fill_statistics
from trocar_server.rpc.text import sendable
from trocar_server.surgery.naming import gradient_port
from trocar_server.surgery.structure import format_picks

Parts = list[bytes | memoryview]
"""One message as the pieces that it is joined from."""


@dataclass
class ReplyForm:
    """The form of the last reply to a request, which the next one is likely to have as well.

    form = ReplyForm()
    head = form.head(plan, extraction) + reply_tail(extraction, is_shared=False)
    """

    _last: Extraction | None = None
    _head: bytes = b""

    def head(self, plan: Plan, extraction: Extraction) -> bytes:
        """Return everything but the values of a reply and what `reply_tail` adds."""
        if self._last is None or not _has_form(extraction, self._last):
            head = reply_head(plan, extraction)
            head.ClearField("timing")
            head.ClearField("execution")
            self._head = head.SerializeToString()
            maps = tuple(replace(found, values=None) for found in extraction.feature_maps)
            self._last = replace(extraction, feature_maps=maps) if _is_plain(extraction) else None
        return self._head


def reply_tail(extraction: Extraction, *, is_shared: bool) -> bytes:
    """Return what differs between replies of one form: two messages in a row are merged."""
    return pb.ExtractResponse(
        timing=pb.ServerTiming(queue_s=extraction.queue_s, compute_s=extraction.compute_s),
        execution=report_to_wire(extraction.report),
        is_shared=is_shared,
    ).SerializeToString()


def reply_messages(
    plan: Plan, extraction: Extraction, form: ReplyForm | None = None, *, is_shared: bool = False
) -> Iterator[Parts]:
    """Yield the messages of a reply: one without chunks where the values lie in shared memory."""
    head = (form or ReplyForm()).head(plan, extraction) + reply_tail(extraction, is_shared=is_shared)
    values = [] if is_shared else values_of(extraction.feature_maps)
    return framed(head, values, plan.max_chunk_bytes)


def _is_plain(extraction: Extraction) -> bool:
    """Whether nothing in a reply but its values depends on the data."""
    if extraction.objective_value is not None:
        return False
    return all(found.statistics is None and found.cast is None for found in extraction.feature_maps)


def _has_form(extraction: Extraction, last: Extraction) -> bool:
    """Whether a reply has the form of the last one, which was plain."""
    return (
        _is_plain(extraction)
        and len(extraction.feature_maps) == len(last.feature_maps)
        and all(map(_is_alike, extraction.feature_maps, last.feature_maps))
        and extraction.stopped_at == last.stopped_at
        and extraction.expansions == last.expansions
        and extraction.edit_expansions == last.edit_expansions
    )


def _is_alike(one: FeatureMap, other: FeatureMap) -> bool:
    # Of the same source, which is made anew where a model is, and so not compared field by field.
    a, b = one.output, other.output
    return a.source is b.source and (a.name, a.shape, a.dtype, a.has_values, a.companion_of) == (
        *(b.name, b.shape, b.dtype, b.has_values, b.companion_of),
    )


def framed(head: bytes, payloads: Sequence[memoryview], chunk_bytes: int) -> Iterator[Parts]:
    """Yield messages: what fits one chunk goes out with the head, in one message."""
    if sum(payload.nbytes for payload in payloads) <= chunk_bytes:
        yield [head, *(part for chunk in _chunks(payloads, chunk_bytes) for part in chunk)]
        return
    yield [head]
    for chunk in _chunks(payloads, chunk_bytes):
        yield list(chunk)


def values_of(feature_maps: Sequence[FeatureMap]) -> list[memoryview]:
    """Return the payloads of a reply."""
    return [found.values.data for found in feature_maps if found.values is not None]


def join_parts(parts: Parts) -> bytes:
    """Be the response serialiser: gRPC wants one `bytes` (a `memoryview` hangs the client)."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


def _chunks(payloads: Sequence[memoryview], chunk_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    for index, payload in enumerate(payloads):
        yield from split_payload(index, payload, chunk_bytes)


def reply_head(plan: Plan, extraction: Extraction) -> pb.ExtractResponse:
    """Describe a reply, without its chunks."""
    return pb.ExtractResponse(
        feature_maps=[describe(feature_map) for feature_map in extraction.feature_maps],
        expansions=expansions(plan, extraction.expansions),
        timing=pb.ServerTiming(queue_s=extraction.queue_s, compute_s=extraction.compute_s),
        stopped_at=extraction.stopped_at,
        edit_expansions=edit_expansions(extraction.edit_expansions),
        objective_value=extraction.objective_value,
        execution=report_to_wire(extraction.report),
    )


def expansions(plan: Plan, names: Sequence[Sequence[str]]) -> list[pb.SelectorExpansion]:
    """Say what each selector became."""
    return [
        pb.SelectorExpansion(selector=tap.selector.text, names=map(sendable, found))
        for tap, found in zip(plan.taps, names, strict=True)
    ]


def edit_expansions(found: Sequence[tuple[str, Sequence[str]]]) -> list[pb.SelectorExpansion]:
    """Say what the selector of each edit became."""
    return [pb.SelectorExpansion(selector=text, names=map(sendable, names)) for text, names in found]


def describe(feature_map: FeatureMap) -> pb.FeatureMap:
    """Describe one feature map and add its statistics."""
    message, found = describe_output(feature_map.output), feature_map.statistics
    if found is not None:
        fill_statistics(message, feature_map.output.source.tap.statistics, found)
    if feature_map.cast is not None:
        message.cast.CopyFrom(_cast(feature_map.cast))
    return message


def _cast(cast: CastValue) -> CastResult:
    return CastResult(
        original_dtype=to_wire(cast.original_dtype),
        scales=cast.scales,
        channel_dim=cast.channel_dim,
        max_error=cast.max_error,
    )


def describe_output(output: Output) -> pb.FeatureMap:
    """Describe one feature map as a plan knows it."""
    target = output.source.target
    return pb.FeatureMap(
        name=sendable(output.name),
        path=target.path,
        type=output.source.type_name,
        call_index=target.call,
        port=gradient_port(target.port) if target.is_gradient else target.port,
        pick=sendable(format_picks(target.picks)),
        tensor=spec_to_wire(output.shape, output.dtype),
        byte_count=output.byte_count,
        has_values=output.has_values,
        companion_of=sendable(output.companion_of),
    )
