"""Scopes: the permissions of a caller."""

from collections.abc import Iterable
from enum import StrEnum, unique


@unique
class Scope(StrEnum):
    """Permission for one kind of call. `rpc.call.method_scopes` lists the scope of each method."""

    READ = "read"
    """List, describe and plan; nothing is computed or changed."""
    RUN = "run"
    """Run hosted models: extraction, gradients, streams, and edits stored for them. Includes `read`."""
    TRAIN = "train"
    """The caller's own trainers, fits and data sets. Includes `read`."""
    ADMIN = "admin"
    """Load, unload and publish models. Includes all others."""


_INCLUDED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.RUN: frozenset({Scope.RUN, Scope.READ}),
    Scope.TRAIN: frozenset({Scope.TRAIN, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
}


def with_included(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """The scopes, with the scopes that they imply."""
    return frozenset().union(*(_INCLUDED[scope] for scope in scopes))
