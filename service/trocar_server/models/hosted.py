"""Hosted model: a module in memory, with its metadata."""

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn

from trocar_server.errors import ServiceError
from trocar_server.forward_signature import ForwardSignature, signature_of
from trocar_server.models.families import Family
from trocar_server.models.inputs import InputSignature, example_only
from trocar_server.models.preprocessing import Preprocessor
from trocar_server.models.pristine import Pristine
from trocar_server.models.spec import ModelSpec

_OWN_POSITIONS = (
    *("create_position_ids_from_input_ids", "build_alibi_tensor", "get_rope_index"),
    "relative_attention_bias",
)
"""Attributes of models of transformers: positions from ids or mask, and those relative to other tokens."""

ExampleArguments = tuple[Tensor | list[Tensor], ...]
"""Positional arguments of one pass."""


@dataclass(frozen=True, eq=False)
class HostedModel:
    """A loaded model.

    The module is in eval mode, its parameters require no gradients, and it is never hooked: passes run on its
    replicas.
    """

    spec: ModelSpec
    """The spec requested by the operator or client."""
    module: nn.Module
    """The original, whose weights every replica shares."""
    family: Family
    """The kind of task."""
    weights: str
    """Where the weights come from: an enum name, `random:0`, `file` or `factory`."""
    categories: tuple[str, ...]
    """Class names by index; empty when unknown."""
    preprocessing: Preprocessor | None
    """Image preprocessing; None for a model that takes pixels as arrays, if any."""
    input_shape: tuple[int, ...]
    """Shape of one example input without its batch dimension."""
    parameter_count: int
    """Number of parameter elements, tied ones once."""
    byte_count: int
    """Bytes of parameters and buffers, shared storage once."""
    device: torch.device
    """Device of the parameters."""
    dtype: torch.dtype | None
    """The dtype of the first floating-point parameter, or of most of them for `hf:`; None without one."""
    known_signature: InputSignature | None = None
    """Named inputs, from the model's library or the operator; None where only an example is known."""
    stages: Mapping[str, str] = field(default_factory=dict)
    """Selectors by stage name, the operator's not included."""
    processor_folder: Path | None = None
    """Folder with the files of its tokenizer or feature extractor; None for a model without them."""
    why_no_images: str = ""
    """What its image processor does that the preprocessing cannot do; empty where it has none or it can."""
    processor_version: str = field(default_factory=lambda: secrets.token_hex(8), compare=False)
    """Unique for each load: the files in its processor's folder may be others the next time."""

    example_batch: int = 1
    """Samples of an example pass: more than one where the model does not take one."""

    known_pristine: Pristine | None = field(default=None, repr=False)
    """What passes write to, where it is known of another model; see `pristine`."""

    @cached_property
    def pristine(self) -> Pristine:
        """The original of the model's replicas. Owner thread only."""
        return self.known_pristine or Pristine(self.module)

    @property
    def signature(self) -> InputSignature:
        """The named inputs."""
        return self.known_signature or example_only("", self.input_shape, self.dtype)

    @cached_property
    def forward(self) -> ForwardSignature:
        """The parameters of its forward. See Note: [Names of arguments] in `forward_signature`."""
        return signature_of(self.module)

    def bind(self, names: Sequence[str], flags: Collection[str] = ()) -> tuple[str, ...]:
        """Return the name of each argument of a call; see `ForwardSignature.bind`.

        Args:
            names: As the caller gives them, empty for an argument by position.
            flags: Those of them that are no tensors.

        Raises:
            ServiceError: `INPUT_REJECTED`.
        """
        is_listed = self.known_signature is not None and self.known_signature.is_complete
        return self.forward.bind(names, names if is_listed else flags)  # `InputSignature` checks the rest

    @cached_property
    def example_names(self) -> tuple[str, ...]:
        """The name of each argument of `example_inputs`; empty where the forward has no names."""
        if self.known_signature is not None:
            return tuple(self.known_signature.example(1))
        unnamed = ("",) * len(self.example_inputs())
        try:
            return self.bind(unnamed)
        except ServiceError:  # the pass on it then says what is wrong
            return unnamed

    @cached_property
    def computes_positions(self) -> bool:
        """Whether padding before a text moves no position: it computes them itself, or relative ones."""
        return any(hasattr(part, own) for part in self.module.modules() for own in _OWN_POSITIONS)

    @cached_property
    def takes_list(self) -> bool:
        """Whether the module takes a list of (channels, height, width) tensors: detection."""
        return self.family.takes_list

    def example_inputs(self, batch: int | None = None) -> ExampleArguments:
        """Return the arguments of a pass on seeded values in [0, 1), the same at every call.

        One tensor (batch, *input_shape); for detection one list of `batch` tensors; for optical
        flow two tensors, the earlier and the later frame. Where inputs are named, those that are required,
        with valid values; see `example_names`. The batch is `example_batch` when None.
        """
        batch = self.example_batch if batch is None else batch
        if self.known_signature is not None:
            examples = self.known_signature.example(batch, self.dtype).values()
            return tuple(value.to(self.device) for value in examples)
        generator = torch.Generator().manual_seed(0)
        count = 2 if self.family is Family.OPTICAL_FLOW else 1
        values = torch.rand((count, batch, *self.input_shape), generator=generator)
        arguments = values.to(self.device, self.dtype or torch.float32).unbind()
        return (list(arguments[0].unbind()),) if self.takes_list else arguments


def count_bytes(tensors: Iterable[Tensor]) -> int:
    """Byte count of tensors; shared storage counts once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return sum(storage.nbytes() for storage in storages.values())
