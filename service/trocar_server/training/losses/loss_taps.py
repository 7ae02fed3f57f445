"""Loss taps: intermediate values of a pass for loss terms, within the autograd graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Collector, Recording, TapSession, Target
from trocar_server.training.losses.loss_values import loss_target


class LossTaps:
    """Collects values by their selectors from passes of a module tree.

        taps = LossTaps(["layer4", "layer3/in"], recording)
        with taps.collecting(model) as values:
            model(batch)
        values["layer4"]

    Values are copied on collection, because a later in-place operation may change them; their gradients flow
    through the copy.

    Args:
        selectors: Each selects exactly one tensor of one call of a module.
        record: Returns a recorded pass of the model; called only if there are selectors.

    Raises:
        ServiceError: A selector does not select exactly one value; see `loss_target`.
    """

    def __init__(self, selectors: Sequence[str], record: Callable[[], Recording]) -> None:
        self._targets: dict[str, Target] = {}
        if selectors:
            recording = record()
            self._targets = {text: replace(loss_target(text, recording), clone=True) for text in selectors}

    @property
    def paths(self) -> frozenset[str]:
        """The paths of the modules of its values."""
        return frozenset(target.path for target in self._targets.values())

    @contextmanager
    def collecting(self, module: nn.Module, *, ends_pass: bool = False) -> Iterator[dict[str, Tensor]]:
        """Collect values inside the context into the yielded dict; `ends_pass` stops the pass after the last.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`, the pass did not reach a value.
        """
        values: dict[str, Tensor] = {}
        if not self._targets:
            yield values
            return
        session = TapSession(module, list(self._targets.values()), Collector(ends_pass=ends_pass))
        with session:
            yield values
        for text, target in self._targets.items():
            if target.name not in session.values:
                raise ServiceError(
                    ErrorReason.MODULE_NOT_CALLED,
                    f"'{text}' was not called in this pass: which modules run depends on the data",
                    name=text,
                )
            values[text] = session.values[target.name]
