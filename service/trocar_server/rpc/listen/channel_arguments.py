"""Channel arguments of a gRPC server: message limits, keepalive, compression."""

from trocar_server.config import Limits
from trocar_server.rpc.transfer.compression import OPTIONS

# Older clients send inputs of up to 4 MiB in one message; the extra room is for descriptions.
_MESSAGE_ROOM_BYTES = 8 << 20


def server_options(limits: Limits, max_message_bytes: int) -> list[tuple[str, int]]:
    """Return the arguments of a server.

    Args:
        limits: Name the largest chunk.
        max_message_bytes: Of one received message; at least the size of a chunk with its description.
    """
    longest = max(max_message_bytes, limits.max_chunk_bytes + _MESSAGE_ROOM_BYTES)
    return [
        ("grpc.max_receive_message_length", longest),
        ("grpc.so_reuseport", 0),
        # Clients of long streams send keepalive pings every 20 s; gRPC's default rejects that as too often.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        *OPTIONS,
    ]
