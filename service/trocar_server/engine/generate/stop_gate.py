"""Stop gate: ends a text where a direction reads enough.

# Note: [Stop gates]
A pass chooses the token that follows one position: the last of the prompt in the first pass, then that of the
generated token which it is for. The gate reads this position alone, in every pass, and the text ends behind
the token that was chosen there: nothing is computed that a run without the gate would not compute, and the
readings of all generated tokens but the last are those of passes that have run.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trocar_api.reasons import ErrorReason
from trocar_server.engine.request.plan import Payload, TapRequest
from trocar_server.engine.resolve.tap_outputs import TapTarget
from trocar_server.errors import ServiceError
from trocar_server.surgery import parse_selector
from trocar_server.surgery.axes.layout import samples_dim_of, tokens_dim_of
from trocar_server.tensors.edits import Gate
from trocar_server.tensors.reductions import Readout

STOP_WHEN = "options.stop_when"
"""Its name in errors."""
_RANK = 3
"""Samples, tokens and channels."""


@dataclass(frozen=True)
class StopGate:
    """A gate that ends texts; see Note: [Stop gates].

    Attributes:
        direction: The name of the direction that it reads.
        gate: The gate.
        operands: The bytes of the direction's vector and bias.
    """

    direction: str
    gate: Gate
    operands: tuple[Payload, ...]

    @property
    def tap(self) -> TapRequest:
        """What collects the value that it reads, behind the taps of the caller."""
        readout = Readout(*self.gate.vectors.shape)
        return TapRequest(
            parse_selector(self.gate.place), values=False, reductions=(readout,), suffix=" (stop_when)"
        )

    def check(self, target: TapTarget) -> None:
        """Refuse a value that has not one vector for each token.

        Args:
            target: What its tap collects.

        Raises:
            ServiceError: `INVALID_ARGUMENT`.
        """
        layout, shape = target.target.layout, target.leaf.shape or ()
        if None in (samples_dim_of(layout), tokens_dim_of(layout)) or len(shape) != _RANK:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{STOP_WHEN}: a gate reads one number for each token, and '{self.gate.place}' of shape "
                f"{shape} has not one vector for each",
                field=STOP_WHEN,
            )

    def is_open(self, target: TapTarget, value: torch.Tensor, operands: Sequence[torch.Tensor]) -> bool:
        """Return whether it is open at the last position of a pass.

        Args:
            target: What its tap collects.
            value: The value in this pass.
            operands: The direction's vector and bias.
        """
        samples, tokens = samples_dim_of(target.target.layout), tokens_dim_of(target.target.layout)
        assert samples is not None  # refused before
        assert tokens is not None
        return bool(self.gate.is_open(value.movedim((samples, tokens), (0, 1)), operands)[0, -1])
