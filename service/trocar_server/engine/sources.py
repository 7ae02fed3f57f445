"""Passes on other inputs, from which swaps take values: they run first, on the same replica."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.engine.collecting import Arguments, Work, collect
from trocar_server.engine.hosting import Host, SourceForm
from trocar_server.engine.inputs import build_arguments, signature_of
from trocar_server.engine.lease import Replica
from trocar_server.engine.plan import Payload, SourceInputs, split_arguments
from trocar_server.engine.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard


@dataclass(frozen=True)
class SourcePass:
    """One source: its arguments, and what a pass on them calls."""

    name: str
    arguments: Arguments
    form: SourceForm

    @classmethod
    def of(
        cls,
        host: Host,
        source: SourceInputs,
        payloads: Sequence[Payload],
        images: Sequence[list[Image.Image]],
        guard: PassGuard,
    ) -> Self:
        """Make the arguments of a source and record a pass on them. Owner thread only."""
        names = [entry.name for entry in source.inputs]
        arguments = build_arguments(host.hosted, source.inputs, payloads, images, guard)
        signature = signature_of(names, arguments)
        called = split_arguments(names, arguments)
        return cls(source.name, called, SourceForm(signature, host.record(signature, guard)))


def found_values(
    replica: Replica, resolved: Resolved, sources: Sequence[SourcePass], guard: PassGuard
) -> dict[str, torch.Tensor]:
    """Run a pass, without edits, for each source that a swap takes values from, and return them by key.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, a source's data does not take the model there.
    """
    found: dict[str, torch.Tensor] = {}
    for source in sources:
        targets = resolved.surgery.source_targets(source.name)
        if not targets:
            continue
        with torch.no_grad():  # and no inference mode: autograd may keep these values for the backward pass
            found |= collect(replica.module, source.arguments, Work(targets), guard).values
        missing = [target.name for target in targets if target.name not in found]
        if missing:
            raise ServiceError(
                ErrorReason.MODULE_NOT_CALLED, f"'{missing[0]}' was not called: the model decides on its data"
            )
    return found
