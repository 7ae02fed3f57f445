"""Text taps: what a pass of a text collects, for the caller and for the run itself."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from trocar_server.engine.generate.sampling import Sampling
from trocar_server.engine.request.plan import Plan, TapRequest
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.surgery import parse_selector

_LOGITS = TapRequest(parse_selector('/out["logits"]'), alias="logits of the next token", values=False)


def own_taps(sampling: Sampling) -> tuple[TapRequest, ...]:
    """Return the taps that a run adds, which come last."""
    return (_LOGITS,) if sampling.stop_when is None else (_LOGITS, sampling.stop_when.tap)


@dataclass(frozen=True)
class TextTaps:
    """The values that a pass collects.

    Attributes:
        asked: Of the caller's taps.
        logits: The logits, which choose the next token.
        stop: What a gate that ends the text reads; None without one.
    """

    asked: Sequence[TapTarget]
    logits: TapTarget
    stop: TapTarget | None

    @classmethod
    def of(cls, plan: Plan, targets: Sequence[TapTarget]) -> Self:
        """Tell the values of a plan with `own_taps` apart."""
        place = plan.taps.index(_LOGITS)
        asked = [target for target in targets if target.tap_index < place]
        logits, *others = targets[len(asked) :]
        return cls(asked, logits, others[0] if others else None)
