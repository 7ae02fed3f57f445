"""Paired samples: a list of inputs and their targets, such as images and labels."""

from collections.abc import Mapping, Sequence
from typing import Any

from trocar._base.tensors import is_array
from trocar.errors import SourceError


class Paired:
    """A data set of inputs in a list, with targets in another list or an array, or several by name.

        Paired([image, image], [0, 1])[1]           # (image, 1)

    Args:
        inputs: The inputs.
        targets: As many.

    Raises:
        SourceError: There are other numbers of targets than of inputs.
    """

    def __init__(self, inputs: Sequence[object], targets: Any) -> None:
        self._inputs, self._targets = inputs, targets
        named = targets if isinstance(targets, Mapping) else {"": targets}
        for name, values in named.items():
            if not is_array(values) and not isinstance(values, (list, tuple)):
                raise SourceError(
                    f"{name or 'the targets'} are {type(values).__name__}; give one for each input, in a "
                    "list or an array"
                )
            if len(values) != len(inputs):
                raise SourceError(f"there are {len(inputs)} inputs and {len(values)} targets {name}".rstrip())

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[object, object]:
        if isinstance(self._targets, Mapping):
            return self._inputs[index], {name: values[index] for name, values in self._targets.items()}
        return self._inputs[index], self._targets[index]
