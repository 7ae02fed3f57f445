"""Inference replies as bytes: protobuf writes the description; tensors follow without another copy."""

from typing import Any

from trocar_server.rpc.codec.replies import Parts

_RAW_OUTPUT_TAG = bytes((6 << 3 | 2,))
_INFER_RESPONSE_TAG = bytes((2 << 3 | 2,))


def infer_parts(response: Any, payloads: list[memoryview]) -> Parts:
    """Return a `ModelInferResponse` with its `raw_output_contents`: byte-equal to protobuf's."""
    parts: Parts = [response.SerializeToString()]
    for payload in payloads:
        parts += [_RAW_OUTPUT_TAG + _varint(payload.nbytes), payload]
    return parts


def stream_parts(parts: Parts) -> Parts:
    """Return the `ModelStreamInferResponse` around a `ModelInferResponse`."""
    size = sum(len(part) if isinstance(part, bytes) else part.nbytes for part in parts)
    return [_INFER_RESPONSE_TAG + _varint(size), *parts]


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
