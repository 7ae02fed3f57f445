"""Reply cache: a repeated request, answered by content, against a local pass."""

import statistics
from functools import partial
from typing import Any, cast

import trocar
from benchmarks.measuring import Effort, images, in_turns, local_way, takes, timed
from benchmarks.numerics import NUMERICS, why_not
from benchmarks.report import Figure, Row, Table
from benchmarks.served import served
from trocar._bench.local_passes import Local, LocalJob
from trocar._bench.served import answer_of
from trocar_server.config import Limits

_ROUNDS, _TARGET = 10, 0.05
_CONFIG = "[limits]\nfeature_cache_bytes = 1073741824\n"
_CASES = [
    ("resnet18", "layer4", 1, 20),
    ("resnet50", "layer4", 1, 20),
    ("resnet18", "layer4", 32, 4),
    ("resnet18", "layer1", 32, 4),
]
_NOTE = (
    "Time of a call that was made before, against a local eager pass. By digest: inputs are not sent again."
)
_MISSING = "the server of this version has no feature cache"


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    has_cache = "feature_cache_bytes" in Limits.model_fields and takes(trocar.connect, "options")
    rows = measure(effort) if has_cache else [_missing(*case[:3]) for case in _CASES]
    return [Table("The same request again", rows, NUMERICS, _NOTE)]


def measure(effort: Effort) -> list[Row]:
    """Return a row for each case and kind of request."""
    options: dict[str, Any] = {"options": trocar.options(cache=True)}
    with (
        served(["resnet18=random:0", "resnet50=random:0"], config=_CONFIG) as server,
        Local() as local,
        trocar.connect(server.address, timeout_s=600, **options) as asking,
        trocar.connect(server.address, timeout_s=600) as sending,
    ):
        ways = {"by digest": asking, "inputs sent": sending}
        return [again(client, local, case, way, effort) for case in _CASES for way, client in ways.items()]


def again(
    client: trocar.Client, local: Local, case: tuple[str, str, int, int], way: str, effort: Effort
) -> Row:
    """Return the row of one case and kind of request."""
    model, tap, batch, repeats = case
    inputs = images(batch)
    passes = max(effort.of(repeats) // 4, 1)
    job = LocalJob(model, (tap,), inputs.shape, 0, passes, client.server_info().device)
    target = _TARGET if way == "by digest" else None
    figures = {}
    for numerics in NUMERICS:
        call = partial(client.extract, model, inputs, [tap])
        reason = why_not(numerics, call)
        repeated = partial(call, options=trocar.options(numerics=cast("trocar.Numerics", numerics)))
        if not reason and not _is_kept(repeated):
            reason = "the reply was computed again"
        value = None
        if not reason:
            ours = partial(timed, repeated, effort.of(repeats))
            result = in_turns({"local": local_way(local, job), "again": ours}, effort.of(_ROUNDS))
            value = statistics.median(result["again"]) / statistics.median(result["local"])
        figures[numerics] = Figure(value, target, reason=reason)
    return Row(_name(model, tap, batch, way), figures)


def _is_kept(call: "partial[trocar.FeatureMaps]") -> bool:
    call()
    return answer_of(call()).is_cached


def _name(model: str, tap: str, batch: int, way: str = "by digest") -> str:
    return f"{model}, batch {batch}, `{tap}`, {way}"


def _missing(model: str, tap: str, batch: int) -> Row:
    return Row(_name(model, tap, batch), {name: Figure(None, _TARGET, reason=_MISSING) for name in NUMERICS})
