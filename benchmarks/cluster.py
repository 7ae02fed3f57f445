"""Gateway of a cluster: what it costs, and what is left of that if clients call replicas directly.

    python -m benchmarks.cluster

Without Ray: replicas and gateway are the same processes, and the routing table is sent once. Three clients
take turns: one connected to the replica, one that stays with the gateway, and one that asks it for replicas.
"""

import argparse
import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import trocar
from benchmarks.measuring import Effort, in_turns, timed
from trocar_server.cluster.child_process import ChildProcess

_ROUNDS = 15
_SMALL_CALLS = 40
_LARGE_MIB = 103
_INPUT = np.zeros((1, 4), np.float32)
_STOP_S = 30.0


@contextmanager
def _replica(model_id: str, mebibytes: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Start a replica of a constant; yield its report."""
    options = {"mebibytes": mebibytes}
    model = {"factory": "benchmarks.models:Blob", "input_shape": [4], "options": options}
    config = {"port": 0, "device": "cpu", "data_dir": str(folder), "models": {model_id: model}}
    settings = {"config": config, "model_id": model_id, "replica_id": model_id, "drain_s": 1.0, "key": ""}
    report: dict[str, Any] = {"replica_id": model_id, "model_id": model_id, "slot": "0"}
    child = ChildProcess("trocar_server.cluster.replica_server", settings, report.update)
    try:
        report["address"] = child.wait_ready()
        yield report
    finally:
        child.stop(_STOP_S)


@contextmanager
def _gateway(reports: list[dict[str, Any]]) -> Iterator[str]:
    """Start a gateway before replicas; yield its address."""
    settings = {"config": {"port": 0}, "taken": [], "key": ""}
    child = ChildProcess("trocar_server.cluster.gateway_server", settings, lambda line: None)
    try:
        address = child.wait_ready()
        wanted = {report["model_id"]: 1 for report in reports}
        idle = {"waiting_s": 0.0, "call_count": 0, "is_draining": False}
        child.send({"replicas": [{**report, **idle} for report in reports], "wanted": wanted})
        yield address
    finally:
        child.stop(_STOP_S)


def run(effort: Effort) -> dict[str, float]:
    """Return the medians of each client, and their ratios."""
    result: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as running:
        reports = [
            running.enter_context(_replica(model_id, size, Path(folder)))
            for model_id, size in (("small", 1), ("large", _LARGE_MIB))
        ]
        address = running.enter_context(_gateway(reports))
        for report, taps, repeats in zip(reports, ("corner", "/out"), (_SMALL_CALLS, 1), strict=True):
            model_id = report["model_id"]
            clients = {
                "replica": running.enter_context(trocar.connect(report["address"], timeout_s=600)),
                "gateway": running.enter_context(trocar.connect(address, timeout_s=600, direct=False)),
                "direct": running.enter_context(trocar.connect(address, timeout_s=600)),
            }
            ways = {
                name: partial(timed, partial(client.extract, model_id, _INPUT, [taps]), repeats)
                for name, client in clients.items()
            }
            seconds = in_turns(ways, effort.of(_ROUNDS))
            medians = {name: statistics.median(values) for name, values in seconds.items()}
            result |= {f"{model_id}: {name}, ms": 1e3 * value for name, value in medians.items()}
            result[f"{model_id}: speed through the gateway"] = medians["replica"] / medians["gateway"]
            result[f"{model_id}: speed of direct calls"] = medians["replica"] / medians["direct"]
    return result


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="see that it works; the figures say little")
    print(json.dumps(run(Effort(parser.parse_args().quick)), indent=1))


if __name__ == "__main__":
    main()
