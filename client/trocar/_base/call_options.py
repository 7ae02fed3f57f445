"""Options of calls with tensors, whatever they ask for, and the default of a connection."""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, TypeAlias, get_args

from trocar._base.delegation import explained
from trocar_api.enums import numbers
from trocar_api.v1 import execution_pb2 as pb
from trocar_api.value_words import not_one_of

Numerics: TypeAlias = Literal["exact", "fast", "bf16"]
Priority: TypeAlias = Literal["low", "normal", "high"]
Wire: TypeAlias = Literal["float16", "bfloat16"]

NUMERICS = numbers(pb.Numerics)
PRIORITIES = numbers(pb.Priority)


class CallOptions(NamedTuple):
    """How calls are made, whatever they ask for; made by `options`. None: as the connection says."""

    numerics: Numerics | None = None
    merge: bool | None = None
    cache: bool | None = None
    priority: Priority | None = None
    wire: Wire | None = None
    chunk_bytes: int | str | None = None
    timeout_s: float | None = None


def check_options(given: object) -> None:
    """Refuse what `options` did not make, a mapping, say.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(given, CallOptions):
        raise TypeError(f"options is a {type(given).__name__}; make it with trocar.options(...)")


def check_timeout(timeout_s: float) -> float:
    """Return a timeout as it is.

    Raises:
        TypeError: It is not a number.
        ValueError: It is not a finite positive number.
    """
    try:
        is_positive = math.isfinite(timeout_s) and timeout_s > 0
    except TypeError:
        raise TypeError(f"timeout_s is {timeout_s!r}; give a number of seconds") from None
    if not is_positive:
        raise ValueError(f"timeout_s={timeout_s} is not a finite number of seconds above 0")
    return timeout_s


def over(given: CallOptions, defaults: CallOptions) -> CallOptions:
    """Return options, and the defaults where nothing was said.

    Raises:
        TypeError: They were not made by `options`.
    """
    check_options(given)
    said = {name: value for name, value in given._asdict().items() if value is not None}
    return defaults._replace(**said)


@explained
def options(
    *,
    numerics: Numerics | None = None,
    merge: bool | None = None,
    cache: bool | None = None,
    priority: Priority | None = None,
    wire: Wire | None = None,
    chunk_bytes: int | str | None = None,
    timeout_s: float | None = None,
) -> CallOptions:
    """Return options of calls with tensors, for `options=` of these calls and, as a default, of `connect`.

        client.extract("resnet50", images, ["layer4"], options=trocar.options(numerics="fast"))
        client = trocar.connect("gpu1", options=trocar.options(cache=True, wire="bfloat16"))

    Args:
        numerics: The least exact numerics that you accept: "exact" (bit-equal to eager PyTorch), "fast"
            (float32, a relative error of at most 1e-5) or "bf16" (a cosine of at least 0.9999); the model's
            default when None. Until the server has a faster variant ready, and always with edits, gradients
            and `start_at`, the pass is exact; `maps.execution` reports the numerics used.
        merge: Whether batches may be merged with those of other calls, where the operator's setting of the
            model allows it; exact calls are never merged. True when None.
        cache: Whether replies may come from the server's feature cache, if it has one. True also sends only a
            digest of repeated requests, which is faster if inputs repeat. False computes a pass each time.
            None leaves it to the server.
        priority: "low", "normal" or "high": the order among your own calls. "normal" when None.
        wire: "float16" or "bfloat16": the dtype in which float32 inputs and feature maps are sent; they are
            float32 again at the other end. Halves the bytes for slow networks; slower on one machine.
        chunk_bytes: The maximum number of payload bytes in one message of the reply, or a text such as
            "512KiB"; 1 MiB when None.
        timeout_s: The deadline, in seconds; that of the connection when None.

    Raises:
        TypeError: `merge` or `cache` is no bool, or `timeout_s` no number.
        ValueError: There are no such numerics, priority or dtype of the wire, or `timeout_s` is not positive.
    """
    for name, value, known in (
        ("numerics", numerics, NUMERICS),
        ("priority", priority, PRIORITIES),
        ("wire", wire, get_args(Wire)),
    ):
        if value is not None and value not in known:
            raise ValueError(f"{name} {not_one_of(value, known)}")
    for name, flag in (("merge", merge), ("cache", cache)):
        if flag not in (None, True, False):
            raise TypeError(f"{name} is {flag!r:.60}; give True or False")
    if timeout_s is not None:
        check_timeout(timeout_s)
    return CallOptions(numerics, merge, cache, priority, wire, chunk_bytes, timeout_s)


AS_CONNECTED = CallOptions()
"""Options of who says nothing."""
EXACT = CallOptions(numerics="exact")
"""Options of analyses: the default of the connection could change their numbers."""
