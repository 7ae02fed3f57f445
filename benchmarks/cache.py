"""The same request again, where the server keeps replies by content: against a local pass."""

import statistics
from functools import partial
from typing import Any

import trocar
from benchmarks.measuring import Effort, images, in_turns, local_way, timed
from benchmarks.numerics import NUMERICS, why_not
from benchmarks.report import Figure, Row, Table
from benchmarks.served import served
from trocar._bench.local import Local, LocalJob
from trocar._bench.served import answer_of, takes
from trocar_server.config import Limits

_ROUNDS, _TARGET = 10, 0.05
_CASES = [("resnet18", 1, 20), ("resnet50", 1, 20), ("resnet50", 32, 2)]


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    note = (
        "Time of a call that was made before, against a local eager pass; client and server keep the reply."
    )
    if "feature_cache_bytes" not in Limits.model_fields:
        return [
            Table(
                "The same request again",
                [_missing(model, batch) for model, batch, _ in _CASES],
                NUMERICS,
                note,
            )
        ]
    config = "[limits]\nfeature_cache_bytes = 1073741824\n"
    models = ["resnet18=random:0", "resnet50=random:0"]
    options: dict[str, Any] = {"cache": True} if takes(trocar.connect, "cache") else {}
    with (
        served(models, config=config) as server,
        Local() as local,
        trocar.connect(server.address, timeout_s=600, **options) as client,
    ):
        rows = [_again(client, local, *case, effort) for case in _CASES]
    return [Table("The same request again", rows, NUMERICS, note)]


def _name(model: str, batch: int) -> str:
    return f"{model}, batch {batch}, `layer4`"


def _missing(model: str, batch: int) -> Row:
    reason = "the server of this version has no feature cache"
    return Row(_name(model, batch), {name: Figure(None, _TARGET, reason=reason) for name in NUMERICS})


def _again(client: trocar.Client, local: Local, model: str, batch: int, repeats: int, effort: Effort) -> Row:
    inputs = images(batch)
    job = LocalJob(
        model, ("layer4",), inputs.shape, 0, max(effort.of(repeats) // 4, 1), client.server_info().device
    )
    figures = {}
    for numerics in NUMERICS:
        options: dict[str, Any] = {"numerics": numerics} if takes(trocar.Client.extract, "numerics") else {}
        call = partial(client.extract, model, inputs, ["layer4"])
        reason = why_not(numerics, call)
        if not reason and not answer_of(_twice(partial(call, **options))).is_cached:
            reason = "the reply was computed again"
        value = None
        if not reason:
            repeated = partial(timed, partial(call, **options), effort.of(repeats))
            found = in_turns({"local": local_way(local, job), "again": repeated}, effort.of(_ROUNDS))
            value = statistics.median(found["again"]) / statistics.median(found["local"])
        figures[numerics] = Figure(value, _TARGET, reason=reason)
    return Row(_name(model, batch), figures)


def _twice(call: "partial[trocar.FeatureMaps]") -> trocar.FeatureMaps:
    call()
    return call()
