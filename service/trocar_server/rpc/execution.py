"""How a pass may be run and how it was run, between messages and the engine."""

from trocar_api.v1 import execution_pb2 as pb
from trocar_server.engine.fair_queue import Priority
from trocar_server.engine.outcome import ExecutionReport
from trocar_server.engine.plan import Execution
from trocar_server.engines import Numerics
from trocar_server.rpc.fields import invalid

_NUMERICS: dict[int, Numerics | None] = {
    pb.NUMERICS_UNSPECIFIED: None,
    pb.NUMERICS_EXACT: Numerics.EXACT,
    pb.NUMERICS_FAST: Numerics.FAST,
    pb.NUMERICS_BF16: Numerics.BF16,
}
_TO_WIRE = {found: number for number, found in _NUMERICS.items() if found is not None}
_PRIORITIES: dict[int, Priority] = {
    pb.PRIORITY_UNSPECIFIED: Priority.NORMAL,
    pb.PRIORITY_LOW: Priority.LOW,
    pb.PRIORITY_NORMAL: Priority.NORMAL,
    pb.PRIORITY_HIGH: Priority.HIGH,
}


def to_execution(message: pb.Execution) -> Execution:
    """Convert what a caller says of his passes.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if message.numerics not in _NUMERICS:
        raise invalid("execution.numerics", f"{message.numerics} is unknown; this server is older than that")
    if message.priority not in _PRIORITIES:
        raise invalid("execution.priority", f"{message.priority} is unknown; this server is older than that")
    return Execution(
        _NUMERICS[message.numerics],
        merge=message.merge if message.HasField("merge") else True,
        cache=message.cache if message.HasField("cache") else True,
        priority=_PRIORITIES[message.priority],
    )


def report_to_wire(report: ExecutionReport) -> pb.ExecutionReport:
    """Describe how a pass was run."""
    return pb.ExecutionReport(
        numerics=_TO_WIRE[report.numerics],  # type: ignore[arg-type] # an enum's number
        engine=report.engine,
        row_count=report.row_count,
        is_cached=report.is_cached,
    )
