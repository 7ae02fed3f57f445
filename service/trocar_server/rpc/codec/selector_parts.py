"""Codec of selectors: text or parts on the wire, read by the one parser."""

import re
from collections.abc import Sequence

from trocar_api.v1 import tap_pb2 as pb
from trocar_api.v1.edit_pb2 import Edit
from trocar_server.rpc.codec.fields import MAX_TEXT_CHARACTERS, check_count, invalid
from trocar_server.surgery import Selector, parse_selector
from trocar_server.surgery.selectors.naming import PLAIN_NAME, quote, shown_path, shown_port
from trocar_server.surgery.structure import Picks, format_picks

_TYPE = re.compile(r"[A-Za-z_]\w*")
_PORT = re.compile(
    r"out|in|scores|pattern|logits|sink|grad_out|grad_in|(?:in|param|grad_in|param_grad)\(.+\)", re.DOTALL
)

_ALL = ("param(*)", "param_grad(*)")

_MAX_PICKS = MAX_TEXT_CHARACTERS // len("[0]")
"""More would make a selector that is too long."""

_KINDS = frozenset(pb.SelectorKind.values())
_PREFIXES = {pb.SELECTOR_KIND_FX: "fx:", pb.SELECTOR_KIND_FUNCTION: "fn:"}


def selector_of(field: str, message: pb.Tap | Edit) -> Selector:
    """Parse the selector of a tap or an edit, as text or in parts; `field` is its name in errors.

    Raises:
        ServiceError: `INVALID_SELECTOR`, or `INVALID_ARGUMENT` for an invalid part, with the field named.
    """
    if not message.HasField("parts"):
        return selector_from_text(field, message.selector)
    if message.selector:
        raise invalid(field, "has a selector as text and in parts; give one of them")
    return selector_from_text(field, selector_text(f"{field}.parts", message.parts))


def selector_from_text(field: str, text: str) -> Selector:
    """Parse a selector of a bounded length, so that errors can show it.

    Raises:
        ServiceError: `INVALID_SELECTOR`, or `INVALID_ARGUMENT` with the field named.
    """
    if len(text) > MAX_TEXT_CHARACTERS:
        raise invalid(field, f"over {MAX_TEXT_CHARACTERS} characters")
    return parse_selector(text)


def selector_text(field: str, parts: pb.SelectorParts) -> str:
    """Write a selector that was given in parts; names are quoted if needed.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the field named.
    """
    if parts.kind not in _KINDS:
        raise invalid(f"{field}.kind", f"unknown kind {parts.kind}")
    if parts.type and not _TYPE.fullmatch(parts.type):
        raise invalid(f"{field}.type", "not the name of a class")
    if parts.HasField("call") and parts.is_every_call:
        raise invalid(field, "has a call and is_every_call; give one of them")
    if parts.port and not _PORT.fullmatch(parts.port):
        raise invalid(
            f"{field}.port",
            "is not one of out, in, in(name), param(name), scores, pattern, logits, sink and their gradients",
        )
    call = "@*" if parts.is_every_call else f"@{parts.call}" if parts.HasField("call") else ""
    return "".join(
        (
            _path(parts),
            f":{parts.type}" if parts.type else "",
            call,
            f"/{_port(parts.port)}" if parts.port else "",
            format_picks(_picks(field, parts.picks)),
        )
    )


def _port(port: str) -> str:
    return port if port in _ALL else shown_port(port)


def _path(parts: pb.SelectorParts) -> str:
    if parts.kind == pb.SELECTOR_KIND_REGEX:
        return f"re:{quote(parts.path)}"
    if parts.kind in (pb.SELECTOR_KIND_UNSPECIFIED, pb.SELECTOR_KIND_MODULE):
        path = shown_path(parts.path)
        return path if path not in ("re", "fx", "fn") else quote(path)  # before a class it would be a kind
    names = parts.path.split(".")
    pattern = ".".join(name if not name or PLAIN_NAME.fullmatch(name) else quote(name) for name in names)
    return _PREFIXES.get(parts.kind, "") + pattern


def _picks(field: str, picks: Sequence[pb.Pick]) -> Picks:
    check_count(f"{field}.picks", len(picks), _MAX_PICKS)
    return tuple(_pick(f"{field}.picks[{index}]", pick) for index, pick in enumerate(picks))


def _pick(field: str, pick: pb.Pick) -> int | str:
    step = pick.WhichOneof("step")
    if step is None:
        raise invalid(field, "has neither a position nor a key")
    return pick.position if step == "position" else pick.key
