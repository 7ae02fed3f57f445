"""From an extraction to the messages of its reply."""

from collections.abc import Iterator

from trocar_api.v1 import extraction_pb2 as pb
from trocar_api.wire import split_payload
from trocar_server.engine.engine import Extraction
from trocar_server.engine.passes import FeatureMap
from trocar_server.engine.plan import Plan
from trocar_server.rpc.dtypes import spec_to_wire
from trocar_server.rpc.statistics import fill_statistics
from trocar_server.rpc.text import sendable
from trocar_server.surgery.structure import format_picks

Parts = list[bytes | memoryview]
"""One message as the pieces that it is joined from."""


def reply_messages(plan: Plan, extraction: Extraction) -> Iterator[Parts]:
    """Yield the messages of a reply: what fits one chunk goes out with the head, in one message."""
    head = _head(plan, extraction).SerializeToString()
    payloads = [m.values.data for m in extraction.feature_maps if m.values is not None]
    if sum(payload.nbytes for payload in payloads) <= plan.max_chunk_bytes:
        yield [head, *(part for chunk in _chunks(payloads, plan.max_chunk_bytes) for part in chunk)]
        return
    yield [head]
    for chunk in _chunks(payloads, plan.max_chunk_bytes):
        yield list(chunk)


def join_parts(parts: Parts) -> bytes:
    """Be the response serialiser: gRPC wants one `bytes` (a `memoryview` hangs the client)."""
    return parts[0] if len(parts) == 1 and isinstance(parts[0], bytes) else b"".join(parts)


def _chunks(payloads: list[memoryview], chunk_bytes: int) -> Iterator[tuple[bytes, memoryview]]:
    for index, payload in enumerate(payloads):
        yield from split_payload(index, payload, chunk_bytes)


def _head(plan: Plan, extraction: Extraction) -> pb.ExtractResponse:
    return pb.ExtractResponse(
        feature_maps=[_feature_map(feature_map) for feature_map in extraction.feature_maps],
        expansions=[
            pb.SelectorExpansion(selector=tap.selector.text, names=map(sendable, names))
            for tap, names in zip(plan.taps, extraction.expansions, strict=True)
        ],
        timing=pb.ServerTiming(queue_s=extraction.queue_s, compute_s=extraction.compute_s),
        stopped_at=extraction.stopped_at,
    )


def _feature_map(feature_map: FeatureMap) -> pb.FeatureMap:
    tap_target, found = feature_map.tap_target, feature_map.statistics
    target = tap_target.target
    message = pb.FeatureMap(
        name=sendable(target.name),
        path=target.path,
        type=tap_target.type_name,
        call_index=target.call,
        port=target.port,
        pick=sendable(format_picks(target.picks)),
        tensor=spec_to_wire(feature_map.shape, feature_map.dtype),
        byte_count=0 if feature_map.values is None else feature_map.values.nbytes,
        has_values=feature_map.values is not None,
    )
    if found is not None:
        fill_statistics(message, tap_target.tap.statistics, found)
    return message
