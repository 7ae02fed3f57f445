"""Values of a pass that terms of the loss sit on, within the graph."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from torch import Tensor, nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery import Collector, Recording, TapSession, Target
from trocar_server.training.loss_values import loss_target


class WatchedValues:
    """Collects values by their selectors from passes of a module tree.

        watched = WatchedValues(["layer4", "layer3/in"], recording)
        with watched.collecting(model) as values:
            model(batch)
        values["layer4"]

    Values are copied when they are there, as a later in-place operation may change them; their gradients go
    through the copy.

    Args:
        selectors: Each stands for exactly one tensor of one call of a module.
        record: Gives a recorded pass of the model; called only where there are selectors.

    Raises:
        ServiceError: A selector does not stand for one value; see `loss_target`.
    """

    def __init__(self, selectors: Sequence[str], record: Callable[[], Recording]) -> None:
        self._targets: dict[str, Target] = {}
        if selectors:
            recording = record()
            self._targets = {text: replace(loss_target(text, recording), clone=True) for text in selectors}

    @contextmanager
    def collecting(self, module: nn.Module, *, ends_pass: bool = False) -> Iterator[dict[str, Tensor]]:
        """Collect inside the context, into what it returns; `ends_pass` ends the pass with the last value.

        Raises:
            ServiceError: `MODULE_NOT_CALLED`, the pass did not come to a value.
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
                    f"'{text}' was not called in this pass: the model decides on its data",
                    name=text,
                )
            values[text] = session.values[target.name]
