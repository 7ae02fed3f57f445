"""Messages of ranks: values and tensors in the layout of safetensors, with JSON as metadata; never pickles.

channel.send_bytes(encode({"seed": 3, "args": (images,)}))
decode(channel.recv_bytes())
"""

import json
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from torch import Tensor

from trocar_api.reasons import ErrorReason
from trocar_server.storage.durable import DamagedError
from trocar_server.storage.tensor_file import lay_out, parse_tensors
from trocar_server.training.losses.batch import Batch
from trocar_server.training.step.trainer_state import pack, unpack

_MESSAGE = "trocar.message"
Verdict = Literal["average", "drop"]
"""Whether a shard's gradients count."""


def encode(value: Any) -> bytes:
    """Return a message of tensors, numbers, strings, lists, tuples and dicts with strings as keys.

    Raises:
        TypeError: The value has other types.
    """
    tensors: dict[str, Tensor] = {}
    text = json.dumps(pack(value, "message", tensors))
    return b"".join(lay_out(tensors, {_MESSAGE: text}).pieces())


def decode(data: bytes) -> Any:
    """Return the value of a message; its tensors have memory of their own.

    Raises:
        DamagedError, ServiceError: It is no message.
    """
    content = parse_tensors(data)
    try:
        packed = json.loads(content.metadata[_MESSAGE])
    except (KeyError, ValueError):
        raise DamagedError("it is no message of a rank") from None
    return unpack(packed, content.tensors)


def send(channel: Connection, value: Any) -> None:
    """Send a message.

    Raises:
        OSError: The other process has ended.
    """
    channel.send_bytes(encode(value))


def receive(channel: Connection) -> Any:
    """Wait for a message.

    Raises:
        EOFError, OSError: The other process has ended.
    """
    return decode(channel.recv_bytes())


@dataclass(frozen=True)
class Shard:
    """A rank's part of a batch."""

    batch: Batch
    seed: int
    """Seed of the model's random numbers in this step."""

    def to_message(self) -> dict[str, Any]:
        """Return its message."""
        batch = self.batch
        targets = dict(batch.targets)
        return {
            "args": batch.args,
            "kwargs": batch.kwargs,
            "targets": targets,
            "size": batch.size,
            "seed": self.seed,
        }

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "Shard":
        """Return the shard of a message."""
        seed = message.pop("seed")
        return cls(Batch(**message), seed)


@dataclass(frozen=True)
class ShardResult:
    """Result of the forward and backward pass of a shard."""

    loss: float = float("nan")
    terms: dict[str, float] = field(default_factory=dict)
    changed: dict[int, int] = field(default_factory=dict)
    """How many elements each gradient edit changed."""
    collected: frozenset[str] = frozenset()
    """Names of the parameters that have a gradient."""
    not_finite: str = ""
    """What was not finite; empty if everything was."""
    problem: tuple[ErrorReason, str] | None = None
    """Reason and message of the pass's failure."""

    def to_message(self) -> dict[str, Any]:
        """Return its message."""
        return vars(self) | {"changed": list(self.changed.items()), "collected": sorted(self.collected)}

    @classmethod
    def of_message(cls, message: dict[str, Any]) -> "ShardResult":
        """Return the result of a message."""
        return cls(
            **message
            | {
                "changed": dict(message["changed"]),
                "collected": frozenset(message["collected"]),
                "problem": problem_of(message),
            }
        )


def problem_of(message: dict[str, Any]) -> tuple[ErrorReason, str] | None:
    """Return the reason and the message of a failure; None if there was none."""
    problem = message.get("problem")
    return None if problem is None else (ErrorReason(problem[0]), str(problem[1]))
