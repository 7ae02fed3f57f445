"""Codec of replies: from an extraction to the messages of its reply."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.v1.reduction_pb2 import CastResult
from trocar_api.wire import chunk_header, split_payload
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.resolve.tap_outputs import Output, TapTarget
from trocar_server.engine.run.extraction import Extraction
from trocar_server.engine.run.pass_result import FeatureMap
from trocar_server.engine.run.preview import Preview
from trocar_server.rpc.codec.execution import report_to_wire
from trocar_server.rpc.codec.processor_inputs import processed_to_wire
from trocar_server.rpc.codec.statistics import fill_statistics
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.codec.wire_dtypes import spec_to_wire, to_wire
from trocar_server.surgery.selectors.naming import gradient_port
from trocar_server.surgery.structure import format_picks
from trocar_server.tensors.reductions import CastValue, Reduction, TokenRows

Parts = list[bytes | memoryview]
"""One message as pieces to be joined."""


@dataclass
class CachedHead:
    """The signature of the last reply to a request, which the next reply is likely to share.

    cached = CachedHead()
    head = cached.head(plan, extraction)
    """

    _last: Extraction | None = None
    _head: bytes = b""

    def head(self, plan: Plan, extraction: Extraction) -> bytes:
        """Head of a reply: everything but its values and times."""
        if self._last is None or not _shares_head(extraction, self._last):
            self._head = _shared_head(plan, extraction).SerializeToString()
            maps = tuple(replace(result, values=None) for result in extraction.feature_maps)
            self._last = replace(extraction, feature_maps=maps) if _is_plain(extraction) else None
        return self._head


def reply_messages(
    plan: Plan, extraction: Extraction, cached: CachedHead | None = None, *, is_shared: bool = False
) -> Iterable[Parts]:
    """Return the messages of a reply: one without chunks if the values are in shared memory."""
    tail = _times(extraction, is_shared=is_shared).SerializeToString()
    head = (cached or CachedHead()).head(plan, extraction) + tail  # two messages in a row are merged
    values = () if is_shared else extraction.payloads
    return framed(head, values, plan.max_chunk_bytes)


def _is_plain(extraction: Extraction) -> bool:
    """Whether only the values of a reply depend on the data."""
    maps = extraction.feature_maps
    is_plain = extraction.objective_value is None and not extraction.processed
    return is_plain and all(not (result.statistics or result.cast or result.token_texts) for result in maps)


def _shares_head(extraction: Extraction, last: Extraction) -> bool:
    """Whether a reply has the signature of the last one, which was plain."""
    if len(extraction.feature_maps) != len(last.feature_maps):
        return False
    for one, other in zip(extraction.feature_maps, last.feature_maps, strict=True):
        # Of the same source object, recreated with its model, and so not compared field by field.
        if one.output.source is not other.output.source or one.output != other.output:
            return False
        if one.statistics is not None or one.cast is not None or one.token_texts:
            return False
    return (
        extraction.objective_value is None
        and not extraction.processed
        and extraction.stopped_at == last.stopped_at
        and extraction.report == last.report
        and extraction.expansions == last.expansions
        and extraction.edit_expansions == last.edit_expansions
    )


def framed(head: bytes, payloads: Sequence[memoryview], chunk_bytes: int) -> Iterable[Parts]:
    """Return messages: values that fit one chunk are sent with the head, in one message."""
    byte_count = 0
    parts: Parts = [head]
    for index, payload in enumerate(payloads):
        byte_count += payload.nbytes
        if byte_count > chunk_bytes:
            return _chunked(head, payloads, chunk_bytes)
        if payload.nbytes:
            parts += (chunk_header(index, 0, payload.nbytes), payload)
    return [parts]


def _chunked(head: bytes, payloads: Sequence[memoryview], chunk_bytes: int) -> Iterator[Parts]:
    yield [head]
    for index, payload in enumerate(payloads):
        for chunk in split_payload(index, payload, chunk_bytes):
            yield list(chunk)


def values_of(feature_maps: Sequence[FeatureMap]) -> list[memoryview]:
    """Return the payloads of a reply."""
    return [result.values.data for result in feature_maps if result.values is not None]


def join_parts(parts: Parts) -> bytes:
    """Response serialiser: gRPC requires one `bytes` (a `memoryview` hangs the client)."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


def reply_head(plan: Plan, extraction: Extraction) -> pb.ExtractResponse:
    """Describe a reply, without its chunks."""
    head = _shared_head(plan, extraction)
    head.MergeFrom(_times(extraction, is_shared=False))
    return head


def kept_head(plan: Plan, extraction: Extraction) -> bytes:
    """Serialise a reply for the reply cache, without its chunks and its timing."""
    head = reply_head(plan, extraction)
    head.ClearField("timing")
    return head.SerializeToString()


def _shared_head(plan: Plan, extraction: Extraction) -> pb.ExtractResponse:
    """Message shared by replies of one signature."""
    return pb.ExtractResponse(
        feature_maps=[describe(feature_map) for feature_map in extraction.feature_maps],
        expansions=expansions_to_wire(_selectors(plan), extraction.expansions),
        stopped_at=extraction.stopped_at,
        edit_expansions=edit_expansions_to_wire(extraction.edit_expansions),
        objective_value=extraction.objective_value,
        execution=report_to_wire(extraction.report),
        processed=map(processed_to_wire, extraction.processed),
    )


def _times(extraction: Extraction, *, is_shared: bool) -> pb.ExtractResponse:
    """Message that differs between replies of one signature."""
    timing = pb.ServerTiming(queue_s=extraction.queue_s, compute_s=extraction.compute_s)
    return pb.ExtractResponse(timing=timing, is_shared=is_shared)


def plan_response(plan: Plan, preview: Preview, request_byte_count: int) -> pb.PlanResponse:
    """Return the reply of a dry run."""
    return pb.PlanResponse(
        feature_maps=map(describe_output, preview.outputs),
        expansions=expansions_to_wire(_selectors(plan), preview.expansions),
        stopped_at=preview.stopped_at,
        reply_byte_count=sum(output.byte_count for output in preview.outputs),
        request_byte_count=request_byte_count,
        memory_byte_count=preview.memory_bytes,
        is_symbolic=preview.is_symbolic,
        edit_expansions=edit_expansions_to_wire(preview.edit_expansions),
    )


def _selectors(plan: Plan) -> list[str]:
    return [tap.selector.text for tap in plan.taps]


def expansions_to_wire(
    selectors: Sequence[str], names: Sequence[Sequence[str]]
) -> list[pb.SelectorExpansion]:
    """Expansion of the selector of each tap."""
    return [
        pb.SelectorExpansion(selector=selector, names=map(sendable, result))
        for selector, result in zip(selectors, names, strict=True)
    ]


def edit_expansions_to_wire(result: Sequence[tuple[str, Sequence[str]]]) -> list[pb.SelectorExpansion]:
    """Expansion of each edit's selector."""
    return [pb.SelectorExpansion(selector=text, names=map(sendable, names)) for text, names in result]


def describe(feature_map: FeatureMap) -> pb.FeatureMap:
    """Describe one feature map and add its statistics."""
    message, result = describe_output(feature_map.output), feature_map.statistics
    if result is not None:
        fill_statistics(message, feature_map.output.source.tap.statistics, result)
    if feature_map.cast is not None:
        message.cast.CopyFrom(_cast(feature_map.cast))
    for token_id, text in feature_map.token_texts.items():
        message.token_texts.add(token_id=token_id, text=sendable(text))
    return message


def _cast(cast: CastValue) -> CastResult:
    return CastResult(
        original_dtype=to_wire(cast.original_dtype),
        scales=cast.scales,
        channel_dim=cast.channel_dim,
        max_error=cast.max_error,
    )


def describe_output(output: Output) -> pb.FeatureMap:
    """Describe one feature map as known from the plan."""
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
        token_positions=() if output.companion_of else _token_positions(output.source.tap.reductions),
        axes=() if output.companion_of else output.source.axes,
        token_grids=() if output.companion_of else _token_grids(output.source),
    )


def _token_grids(source: TapTarget) -> list[pb.TokenGrid]:
    return [
        pb.TokenGrid(dimension=grid.dim, sizes=grid.sizes, first=grid.first)
        for grid in (() if source.tap.reductions else source.grids)
    ]


def _token_positions(reductions: Sequence[Reduction]) -> list[pb.TokenPositions]:
    rows = next((entry.own_positions for entry in reductions if isinstance(entry, TokenRows)), ())
    return [pb.TokenPositions(positions=row) for row in rows]
