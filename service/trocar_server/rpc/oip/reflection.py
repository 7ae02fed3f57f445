"""Server reflection: our services from protobuf's default pool, this protocol's from its own."""

from collections.abc import Iterable
from typing import Any

from google.protobuf import descriptor_pool
from google.protobuf.descriptor_pb2 import FileDescriptorProto

from trocar_server.rpc.oip.oip_messages import FILE


def pool_of(names: Iterable[str]) -> descriptor_pool.DescriptorPool:
    """Return a pool with these services of the default pool, and with this protocol's.

    Args:
        names: Full names of services.
    """
    default: Any = descriptor_pool.Default()
    pool: Any = descriptor_pool.DescriptorPool()
    seen: set[str] = set()
    for name in names:
        _add(pool, default.FindServiceByName(name).file, seen)
    pool.AddSerializedFile(FILE)
    result: descriptor_pool.DescriptorPool = pool
    return result


def _add(pool: Any, file: Any, seen: set[str]) -> None:
    if file.name in seen:
        return
    seen.add(file.name)
    for needed in file.dependencies:
        _add(pool, needed, seen)
    described = FileDescriptorProto()
    file.CopyToProto(described)
    pool.AddSerializedFile(described.SerializeToString())
