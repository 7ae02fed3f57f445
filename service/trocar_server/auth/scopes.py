"""What a caller may do, as a set of scopes."""

from collections.abc import Iterable
from enum import StrEnum, unique


@unique
class Scope(StrEnum):
    """One kind of calls. `rpc.method_scopes` says which each method needs."""

    READ = "read"
    """List, describe and plan; nothing is computed or changed."""
    RUN = "run"
    """Run hosted models: extraction, gradients, streams, and edits stored for them. Includes `read`."""
    TRAIN = "train"
    """Trainers, fits and data sets of one's own. Includes `read`."""
    ADMIN = "admin"
    """Load, unload and publish models. Includes all others."""


_INCLUDED = {
    Scope.READ: frozenset({Scope.READ}),
    Scope.RUN: frozenset({Scope.RUN, Scope.READ}),
    Scope.TRAIN: frozenset({Scope.TRAIN, Scope.READ}),
    Scope.ADMIN: frozenset(Scope),
}


def with_included(scopes: Iterable[Scope]) -> frozenset[Scope]:
    """Return the scopes with those that they include."""
    return frozenset().union(*(_INCLUDED[scope] for scope in scopes))
