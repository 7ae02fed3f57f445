"""Codec of execution options: requested and actual numerics of a pass, between messages and the engine."""

from collections.abc import Mapping
from typing import Any

from trocar_api.v1 import execution_pb2 as pb
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import Execution
from trocar_server.engine.request.priority import Priority
from trocar_server.engine.run.extraction import ExecutionReport
from trocar_server.rpc.codec.declarations import members_by_number
from trocar_server.rpc.codec.fields import invalid

_NUMERICS: Mapping[int, Numerics | None] = {0: None, **members_by_number(pb.Numerics.DESCRIPTOR, Numerics)}
_TO_WIRE: Any = {numerics: number for number, numerics in _NUMERICS.items() if numerics is not None}
_PRIORITIES = members_by_number(pb.Priority.DESCRIPTOR, Priority, Priority.NORMAL)


def to_execution(message: pb.Execution) -> Execution:
    """Convert the execution options of a request.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if message.numerics not in _NUMERICS:
        raise invalid(
            "execution.numerics",
            f"{message.numerics} is unknown to this server, which may be older than the client; update "
            "the server",
        )
    if message.priority not in _PRIORITIES:
        raise invalid(
            "execution.priority",
            f"{message.priority} is unknown to this server, which may be older than the client; update "
            "the server",
        )
    return Execution(
        _NUMERICS[message.numerics],
        merge=message.merge if message.HasField("merge") else True,
        cache=message.cache if message.HasField("cache") else True,
        priority=_PRIORITIES[message.priority],
    )


def report_to_wire(report: ExecutionReport) -> pb.ExecutionReport:
    """Describe the actual execution of a pass."""
    return pb.ExecutionReport(
        numerics=_TO_WIRE[report.numerics],
        engine=report.engine,
        row_count=report.row_count,
        is_cached=report.is_cached,
        asked=_TO_WIRE[report.asked],
        reason=report.reason,
        stateful=report.stateful,
    )
