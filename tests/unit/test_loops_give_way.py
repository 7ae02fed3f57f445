"""No loop of an asynchronous function can go round for ever without giving way: nothing else would run.

Each loop awaits in every round a function that always suspends, or stands here with what ends it.
"""

import textwrap
from pathlib import Path

import pytest

from tests.support import ROOT
from tests.support.files.async_loops import spinning_loops

LOOPS = {
    # Every round takes a message off a connection: as many rounds as messages that were received.
    "client/trocar/_page/frames.py::messages": "each round removes a frame from the buffer",
    "client/trocar/_page/gateway.py::_answer_lifespan": "each round takes an event of the web server",
    "client/trocar/_page/gateway.py::_cancel_when_gone": "each round takes an event of the web server",
    "client/trocar/_page/gateway.py::_parts": "each round takes an event of the web server",
    "service/trocar_server/app/page_process.py::_last_line": "each round reads bytes; the end ends it",
    "service/trocar_server/cluster/caller_messages.py::send_to": "each round writes a message of the caller",
    "service/trocar_server/cluster/gateway.py::_pass_on": "each round reads a reply of gRPC",
    "service/trocar_server/rpc/services/shared_memory_service.py::_refuse_all": "each round takes a message",
    "service/trocar_server/rpc/services/shared_memory_service.py::share_memory": "each round takes a message",
    "service/trocar_server/rpc/services/trainer_service.py::LoadAdapter": "each round takes a message",
    "service/trocar_server/rpc/transfer/messages.py::receive": "each round takes a message",
    "service/trocar_server/rpc/transfer/prefetch.py::prefetch": "each round takes an item of a queue",
    "service/trocar_server/rpc/transfer/stream_batches.py::batches": "each round takes a message",
    "service/trocar_server/rpc/transfer/stream_batches.py::payloads": "each round takes a message",
    # Every round makes a call over the network, or a pass, which suspend.
    "client/trocar/_async/analysis/analysis_passes.py::health": "each round makes a call and drops an owner",
    "client/trocar/_async/analysis/analysis_passes.py::side_by_side": "each round takes a result of a stream",
    "client/trocar/_async/extraction.py::_receive": "each round makes a call",
    "client/trocar/_async/stream.py::requests": "each round takes a batch, when there is room",
    "client/trocar/_async/trainer.py::_download": "each round makes a call",
    "service/trocar_server/engine/generate/generation.py::passes": "each round waits for a pass",
    "service/trocar_server/engine/generate/generation.py::_run": "each round waits for passes",
    "client/trocar/_async/trainer.py::_following": "waits for a condition, which suspends, or makes a call",
    "service/trocar_server/cluster/gateway.py::_replica": "waits with a timeout for a table, which suspends",
    "service/trocar_server/cluster/gateway.py::run": "each round makes a call to a replica",
    "service/trocar_server/engine/compiled/variant_building.py::warm": "each round drops a runner",
    "service/trocar_server/engine/engine.py::process_inputs": "each round asks a worker process",
    "service/trocar_server/engine/schedule/merging.py::_serve": "each round takes calls that wait",
    "service/trocar_server/training/fit/fit_run.py::_go": "each round makes a step on the device's thread",
    "service/trocar_server/training/trainer.py::replay": "each round repeats a step and drops its entry",
    # Every round waits for something that this very loop has taken down.
    "service/trocar_server/engine/schedule/device.py::_end_of": "only the cancelled wait is suppressed",
    "service/trocar_server/rpc/listen/health_service.py::Watch": "each change has an event of its own",
    "service/trocar_server/rpc/services/prepared_calls.py::ended": "waits for an event that ends the loop",
    "service/trocar_server/engine/generate/steps.py::next": "each round takes a pass, or waits for one",
    "service/trocar_server/engine/generate/steps.py::room": "each round clears the event that it waits for",
    "service/trocar_server/tasks.py::ended": "only the cancelled wait is suppressed",
    "service/trocar_server/training/files/event_log.py::watch": "each round waits, or yields an event",
    "service/trocar_server/training/takeover.py::_run": "each round clears the event that it waited for",
    "service/trocar_server/rpc/transfer/backlog.py::_room": "each round clears the event that it waits for",
    # Nothing is awaited.
    "client/trocar/_async/stream.py::answer": "each round drops a batch that is kept",
}


def test_each_loop_gives_way_or_has_a_known_end() -> None:
    spinning = {
        f"{path.relative_to(ROOT).as_posix()}::{name}"
        for folder in ("service", "client")
        for path in (ROOT / folder).rglob("*.py")
        for name in spinning_loops(path)
    }
    assert spinning == set(LOOPS)


@pytest.mark.parametrize(
    ("body", "spins"),
    [
        ("await asyncio.sleep(1)", False),
        ("await queue.get()", True),
        ("if busy:\n    continue\nawait asyncio.sleep(1)", True),
        ("if busy:\n    return\nawait asyncio.sleep(1)", False),
        ("with suppress(OSError):\n    check()\n    await asyncio.sleep(1)", True),
        ("try:\n    check()\nexcept OSError:\n    pass\nelse:\n    await asyncio.sleep(1)", True),
        ("try:\n    return check()\nexcept OSError:\n    pass\nawait asyncio.sleep(1)", False),
        ("for event in events:\n    await asyncio.sleep(1)", True),
        ("async def later():\n    await asyncio.sleep(1)", True),
    ],
)
def test_a_loop_is_told_by_each_way_through_its_body(tmp_path: Path, body: str, *, spins: bool) -> None:
    path = tmp_path / "module.py"
    path.write_text(f"async def run():\n    while True:\n{textwrap.indent(body, ' ' * 8)}\n")
    assert list(spinning_loops(path)) == ["run"] * spins
