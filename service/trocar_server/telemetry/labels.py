"""Label values of bounded cardinality, whatever callers send."""

from collections.abc import Callable

OTHER = "other"
TRAINER = "trainer"
_MOST = 256


class ModelLabels:
    """Maps model ids sent by callers to a bounded set of label values.

    A model of the catalogue is itself. All trainers are one, `trainer`: there can be any number, and their
    ids are private. Other ids get an empty label. Callers can load and publish models, so after 256 names the
    next ones are `other`.

    Args:
        kind_of: Says of an id whether it is in the catalogue: `catalogue`, `guest` for a trainer, or empty.
    """

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._seen: set[str] = set()

    def of(self, model_id: str) -> str:
        """Label value of an id; empty for an id that is not in the catalogue."""
        if model_id in self._seen:
            return model_id
        kind = self._kind_of(model_id) if model_id else ""
        if kind != "catalogue":
            return TRAINER if kind else ""
        if len(self._seen) >= _MOST:
            return OTHER
        self._seen.add(model_id)
        return model_id
