"""Members of a cluster: the replicas that may serve, all of a model with equal weights.

    members = Members()
    refusal = members.join(report, identity, "version of its settings")   # "", or why it may not
    members.report(report)                                                # four times a second

# Note: [Replicas agree]
A replica joins before a gateway hears of it. The first one of a model says which weights the others of the
same configuration must have; one that differs is refused, and nobody ever calls it. That is one decision at
one place, however replicas come: started, scaled, placed elsewhere after a node was lost, or as the first of
a new configuration, whose replicas are compared among themselves. Whoever was forgotten, because it or this
directory was away, joins again, and is compared again: by then there may be others.

While no replica of the model is there, one with other weights waits: the old one may only have been slow.
After `GONE_S` it is the first of new ones.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

FORGOTTEN_AFTER_S = 5.0
NEW_FOR_S = 2.0
"""So long after its start a directory may not have heard of all."""
GONE_S = 30.0
"""Seconds without any replica of a model after which another one need not agree with them: as long as Ray
waits for a process that does not answer."""
WAIT = "wait"
"""The answer to a replica that has to ask again."""
_TOLERANCE = 1e-3
"""Of computed buffers, in units of their root mean square; drawn ones differ by about one."""

Report = dict[str, Any]
Identity = Mapping[str, Any]


@dataclass
class _Agreed:
    """What the replicas of one model and configuration have in common."""

    identity: Identity
    seen_at: float


@dataclass
class Members:
    """Replicas by their last report.

    Args:
        clock: Returns seconds.
    """

    clock: Callable[[], float] = time.monotonic
    _replicas: dict[str, tuple[float, Report, tuple[str, str]]] = field(default_factory=dict)
    """By id: when it reported last, what, and its model and configuration."""
    _agreed: dict[tuple[str, str], _Agreed] = field(default_factory=dict)
    _refused: dict[str, str] = field(default_factory=dict)
    """By model, why its last replica that could not join was refused."""

    def __post_init__(self) -> None:
        self._began_at = self.clock()

    @property
    def is_new(self) -> bool:
        """Whether some replicas may not have reported yet."""
        return self.clock() - self._began_at < NEW_FOR_S

    def join(self, report: Report, identity: Identity, version: str, *, is_known: bool = False) -> str:
        """Admit a replica; see Note: [Replicas agree].

        Args:
            report: Its first report.
            identity: What `replica_identity` returns.
            version: Of its settings: only replicas of the same are compared.
            is_known: Whether it has served before.

        Returns:
            Nothing if it may serve; `WAIT`, or why it may not.
        """
        if self.is_new and not is_known:
            return WAIT
        self._forget_silent()
        model_id, key = str(report["model_id"]), (str(report["model_id"]), version)
        agreed = self._agreed.get(key)
        if agreed is not None and (difference := difference_of(agreed.identity, identity)):
            own = [one for _, one, of in self._replicas.values() if of == key]
            if not own:
                return WAIT
            self._refused[model_id] = refusal(model_id, difference, own)
            return self._refused[model_id]
        if agreed is None:
            self._agreed[key] = _Agreed(identity, self.clock())
        self._refused.pop(model_id, None)
        self._note(report, key)
        return ""

    def report(self, report: Report) -> None:
        """Take a report; that of a replica that has not joined, or was forgotten, says nothing."""
        known = self._replicas.get(report["replica_id"])
        if known is not None:
            self._note(report, known[2])

    def forget(self, replica_id: str) -> None:
        """Forget a replica that has ended."""
        self._replicas.pop(replica_id, None)

    def reports(self) -> list[Report]:
        """Return the last reports of all that may serve."""
        self._forget_silent()
        return [report for _, report, _ in self._replicas.values()]

    def refused(self) -> dict[str, str]:
        """Return, by model, why its last replica that could not join was refused."""
        return self._refused

    def begin_anew(self) -> None:
        """Forget refusals: there is another configuration."""
        self._refused.clear()

    def _note(self, report: Report, key: tuple[str, str]) -> None:
        now = self.clock()
        self._replicas[report["replica_id"]] = now, report, key
        self._agreed[key].seen_at = now

    def _forget_silent(self) -> None:
        now = self.clock()
        for replica_id, (at, _, _) in list(self._replicas.items()):
            if now - at > FORGOTTEN_AFTER_S:
                del self._replicas[replica_id]
        for key, agreed in list(self._agreed.items()):
            if now - agreed.seen_at > GONE_S:
                del self._agreed[key]


def difference_of(first: Identity, second: Identity) -> str:
    """Describe how two replicas differ; empty if they agree."""
    if parts := list(_differing_parts(first["parts"], second["parts"])):
        is_many = len(parts) > 1 or parts[0].endswith("s")
        return f"its {' and '.join(parts)} {'differ' if is_many else 'differs'}"
    if names := list(_differing(first["buffers"], second["buffers"])):
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        return f"its tensor '{names[0]}'{more} differs"
    return ""


def _differing_parts(first: Mapping[str, str], second: Mapping[str, str]) -> Iterator[str]:
    """Yield the parts of two identities that differ; weights that cannot be hashed are left to sketches."""
    for name in sorted(first.keys() | second.keys()):
        is_known = name != "weights" or (name in first and name in second)
        if is_known and first.get(name) != second.get(name):
            yield name


def _differing(first: Mapping[str, list[float]], second: Mapping[str, list[float]]) -> Iterator[str]:
    """Yield the names of tensors whose sketches differ."""
    for name in sorted(first.keys() | second.keys()):
        one, other = first.get(name, []), second.get(name, [])
        is_like = len(one) == len(other) and all(
            math.isclose(a, b, rel_tol=0.0, abs_tol=_TOLERANCE * max(one[0], other[0]))
            for a, b in zip(one, other, strict=True)
        )
        if not is_like:
            yield name


def refusal(model_id: str, difference: str, own: list[Report]) -> str:
    """Return what the operator reads of a replica that was refused."""
    nodes = ", ".join(sorted({str(report["node_id"])[:8] for report in own}))
    those = (
        "those of the replica that serves"
        if len(own) == 1
        else f"those of the {len(own)} replicas that serve"
    )
    return (
        f"model '{model_id}': a replica was refused, because {difference} from {those} (node {nodes}), "
        "and equal calls would have different answers. A factory that draws random weights draws others for "
        f"each replica: set [models.{model_id}] weights to a seed, as in 'random:0', or to a file; numbers "
        "that it draws elsewhere than from torch, it has to seed itself. If its file or its code was "
        "changed, or differs between nodes: make them equal, `trocar cluster stop`, and deploy again"
    )
