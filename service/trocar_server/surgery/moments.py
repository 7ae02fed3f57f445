"""When the pass comes to a value, and what of it still happens when modules are skipped."""

from collections.abc import Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording import Call, Recording
from trocar_server.surgery.taps import Target


def moment(target: Target, recording: Recording) -> int:
    """Return when a target is collected, on the clock of its kind in the recording; 0 for parameters."""
    if target.parameter is not None:
        return 0
    call = recording.of_kind(target.kind)[target.path].calls[target.call]
    return call.started if target.port.startswith("in") else call.ended


class Skips:
    """Which calls of a recorded pass do not happen, because a module around them is skipped.

    Args:
        skipped: The calls that return their input instead of running.
        recording: Of the pass without skips.
    """

    def __init__(self, skipped: Sequence[Target], recording: Recording) -> None:
        self._recording = recording
        self._spans = {target.name: recording.modules[target.path].calls[target.call] for target in skipped}

    def is_inside(self, target: Target) -> bool:
        """Whether a target's call does not happen."""
        if target.kind != "module" or target.parameter is not None:
            return False
        calls = self._recording.modules[target.path].calls
        return self._around(calls[target.call]) is not None

    def actual(self, target: Target) -> Target:
        """Return a target with the index that its call has in the pass with skips.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`, it is inside of what is skipped, or a function, whose calls
                cannot be counted then.
        """
        if not self._spans or target.parameter is not None:
            return target
        if target.kind != "module":
            raise ServiceError(
                ErrorReason.MODULE_NOT_CALLED,
                f"'{target.name}': functions cannot be told apart where modules are skipped; select modules",
                name=target.name,
            )
        calls = self._recording.modules[target.path].calls
        around = self._around(calls[target.call])
        if around is not None:
            raise ServiceError(
                ErrorReason.MODULE_NOT_CALLED,
                f"'{target.name}' is inside of '{around}', which is skipped, so it never runs",
                name=target.name,
                nearest=around,
            )
        missing = sum(self._around(call) is not None for call in calls[: target.call])
        return replace(target, call=target.call - missing)

    def _around(self, call: Call) -> str | None:
        for name, span in self._spans.items():
            if span.started < call.started and call.ended < span.ended:
                return name
        return None
