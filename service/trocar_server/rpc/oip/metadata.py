"""Model metadata: inputs and outputs of a model, in the protocol's terms."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from trocar_server.config import Limits
from trocar_server.models import HostedModel
from trocar_server.rpc.codec.text import sendable
from trocar_server.rpc.oip.argument_names import input_names
from trocar_server.rpc.oip.counters import VERSION
from trocar_server.rpc.oip.datatypes import Datatype, datatype_of
from trocar_server.rpc.oip.inference_outputs import WHOLE_OUTPUT
from trocar_server.rpc.oip.oip_messages import ModelConfig, ModelMetadataResponse
from trocar_server.surgery import Leaf, Recording
from trocar_server.surgery.structure import format_picks

PLATFORM, BACKEND = "pytorch_eager", "pytorch"
_ANY = -1


@dataclass(frozen=True)
class ModelTensor:
    """One input or output.

    Attributes:
        name: What requests call it.
        datatype: None if the protocol has none for it.
        shape: -1 for a dimension of any size.
    """

    name: str
    datatype: Datatype | None
    shape: tuple[int, ...]

    def as_metadata(self) -> dict[str, Any]:
        """Describe it with its batch dimension."""
        name = self.datatype.name if self.datatype else ""
        return {"name": sendable(self.name), "datatype": name, "shape": self.shape}

    def as_config(self) -> dict[str, Any]:
        """Describe it without its batch dimension."""
        number = self.datatype.number if self.datatype else 0
        return {"name": sendable(self.name), "data_type": number, "dims": self.shape[1:]}


def metadata(hosted: HostedModel, example: Recording) -> Any:
    """Return a `ModelMetadataResponse`."""
    return ModelMetadataResponse(
        name=hosted.spec.model_id,
        versions=[VERSION],
        platform=PLATFORM,
        inputs=[entry.as_metadata() for entry in _inputs(hosted, example)],
        outputs=[entry.as_metadata() for entry in _outputs(example)],
    )


def config(hosted: HostedModel, example: Recording, limits: Limits) -> Any:
    """Return a `ModelConfig`."""
    facts = {"family": hosted.family, "architecture": hosted.spec.architecture, "weights": hosted.weights}
    return ModelConfig(
        name=hosted.spec.model_id,
        platform=PLATFORM,
        backend=BACKEND,
        max_batch_size=limits.max_batch,
        input=[entry.as_config() for entry in _inputs(hosted, example)],
        output=[entry.as_config() for entry in _outputs(example)],
        parameters={key: {"string_value": sendable(str(value))} for key, value in facts.items()},
        model_transaction_policy={"decoupled": False},
    )


def _inputs(hosted: HostedModel, example: Recording) -> list[ModelTensor]:
    """Return the arguments of the example input; other arguments of the forward can be sent, too."""
    leaves = [leaf for leaf in example.modules[""].calls[0].inputs if leaf.shape is not None]
    names = hosted.example_names if hosted.known_signature else input_names(hosted.module, len(leaves))
    pairs = zip(names, leaves, strict=False)  # of a list only the first image is described
    return [ModelTensor(name, datatype_of(leaf.dtype), _input_shape(hosted, leaf)) for name, leaf in pairs]


def _input_shape(hosted: HostedModel, leaf: Leaf) -> tuple[int, ...]:
    shape = leaf.shape or ()
    return (_ANY, *shape) if hosted.takes_list else (_ANY, *shape[1:])


def _outputs(example: Recording) -> Iterator[ModelTensor]:
    for leaf in example.modules[""].calls[0].outputs:
        if leaf.shape is not None:
            name = f"{WHOLE_OUTPUT}{format_picks(leaf.picks)}"
            yield ModelTensor(name, datatype_of(leaf.dtype), _output_shape(leaf.shape, example))


def _output_shape(shape: tuple[int, ...], example: Recording) -> tuple[int, ...]:
    """Output shape, with -1 for sizes that depend on the batch (1 in the example) or on the data."""
    is_open = shape[:1] == (1,) or not example.is_symbolic
    return (_ANY, *shape[1:]) if shape and is_open else shape
