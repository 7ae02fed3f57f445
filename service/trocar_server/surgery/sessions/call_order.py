"""Call order of values in a pass, and the part of it that remains when modules are skipped."""

from collections.abc import Sequence
from dataclasses import replace

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.recording.recording import ModuleCall, Recording
from trocar_server.surgery.sessions.functions import RESULT_PORTS
from trocar_server.surgery.sessions.taps import Target


def call_order(target: Target, recording: Recording) -> int:
    """Return a target's time of collection, on the clock of its kind in the recording; 0 for parameters."""
    if target.parameter is not None:
        return 0
    call = recording.of_kind(target.kind)[target.path].calls[target.call]
    return call.started if target.port.startswith("in") else call.ended


def place(target: Target, recording: Recording) -> tuple[int, ...]:
    """Return a sort key for the collection of a module or function; keys of both kinds are comparable.

    The scores of an attention come before its output, and its logits before both.
    """
    when = call_order(target, recording)
    if target.kind != "fn":
        return when, 0, 0
    port = RESULT_PORTS.index(target.port) if target.port in RESULT_PORTS else 0
    return recording.of_kind("fn")[target.path].calls[target.call].after_module, 1, when, port


class Skips:
    """Calls of a recorded pass that do not run, because an enclosing module is skipped.

    Args:
        skipped: The calls that return their input instead of running.
        recording: Of the pass without skips.
    """

    def __init__(self, skipped: Sequence[Target], recording: Recording) -> None:
        self._recording = recording
        self._spans = {target.name: recording.modules[target.path].calls[target.call] for target in skipped}

    def is_inside(self, target: Target) -> bool:
        """Whether a target's call does not run."""
        if target.kind != "module" or target.parameter is not None:
            return False
        calls = self._recording.modules[target.path].calls
        return self._around(calls[target.call]) is not None

    def actual(self, target: Target) -> Target:
        """Return a target with its call index in the pass with skips.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`, it is inside a skipped module, or a function, whose calls
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
                f"'{target.name}' is inside '{around}', which is skipped, so it never runs",
                name=target.name,
                nearest=around,
            )
        return replace(target, call=target.call - self.missing(calls[: target.call]))

    def missing(self, calls: Sequence[ModuleCall]) -> int:
        """Return how many of a module's calls do not run."""
        return sum(self._around(call) is not None for call in calls)

    def _around(self, call: ModuleCall) -> str | None:
        for name, span in self._spans.items():
            if span.started < call.started and call.ended < span.ended:
                return name
        return None
