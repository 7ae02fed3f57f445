"""Source passes: passes on other inputs, run first on the same replica, whose values swaps use."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.arguments import build_arguments, signature_of
from trocar_server.engine.execute.collecting import Arguments, PassSpec, copied_arguments
from trocar_server.engine.execute.executor import Executor, ReadyCall
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.host.deployment import Deployment, RecordedSource
from trocar_server.engine.host.recordings import MadeDataRefusedError
from trocar_server.engine.request.plan import Payload, SourceInputs
from trocar_server.engine.resolve.planner import Resolved
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard


@dataclass(frozen=True)
class SourcePass:
    """One source: its arguments, and a recorded pass on them."""

    name: str
    arguments: Arguments
    recorded: RecordedSource

    @classmethod
    def of(
        cls,
        deployment: Deployment,
        source: SourceInputs,
        payloads: Sequence[Payload],
        images: Sequence[DecodedImages],
        guard: PassGuard,
    ) -> Self:
        """Make the arguments of a source and record a pass on them. Owner thread only."""
        names = [entry.name for entry in source.inputs]
        arguments = build_arguments(deployment.hosted, source.inputs, payloads, images, guard)
        signature = signature_of(names, arguments)
        called = deployment.hosted.forward.called(names, arguments)
        try:
            recorded = RecordedSource(signature, deployment.record(signature, guard))
        except MadeDataRefusedError:
            recorded = RecordedSource(signature, deployment.record_data(called, guard), is_own=True)
        return cls(source.name, called, recorded)

    def on_own_data(self, deployment: Deployment, guard: PassGuard) -> Self:
        """Return a copy with a recording of its own data, where data decides how often modules are called."""
        recorded = self.recorded
        if recorded.is_own or recorded.recording is None or recorded.recording.is_symbolic:
            return self
        own = deployment.record_data(self.arguments, guard)
        return replace(self, recorded=replace(recorded, recording=own, is_own=True))

    @property
    def spare_arguments(self) -> Arguments:
        """Its arguments for a pass that may have to run again: copies where it may write to them."""
        recording = self.recorded.recording
        is_kept = recording is not None and not recording.overwrites_inputs
        return self.arguments if is_kept else copied_arguments(self.arguments)


def source_values(
    executor: Executor, resolved: Resolved, sources: Sequence[SourcePass], guard: PassGuard
) -> dict[str, torch.Tensor]:
    """Run a pass without edits for each source that swaps use, and return the values by key.

    Raises:
        ServiceError: `MODULE_NOT_CALLED`, the model does not call the module on a source's data.
        CallsDifferError: The data calls modules more or less often than the recorded pass did.
        StateWrittenError: The pass has to run again.
    """
    values: dict[str, torch.Tensor] = {}
    for source in sources:
        swaps = resolved.surgery.swaps_from(source.name)
        if not swaps:
            continue
        targets = [replace(swap.target, name=swap.key, clone=True) for swap in swaps]
        spec = PassSpec(targets, calls=resolved.surgery.source_calls.get(source.name, {}))
        # Not inference mode: autograd may save these values for the backward pass.
        call = ReadyCall(source.spare_arguments, spec, guard, is_inference=False)
        (collected,) = executor.run([call])
        values |= collected.values
        missing = [swap.target.name for swap in swaps if swap.key not in values]
        if missing:
            raise ServiceError(
                ErrorReason.MODULE_NOT_CALLED,
                f"'{missing[0]}' was not called with source '{source.name}': which modules run depends on "
                "the data",
            )
    return values
