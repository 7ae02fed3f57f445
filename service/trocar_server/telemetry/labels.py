"""Label values that stay few, whatever callers send."""

from collections.abc import Callable

OTHER = "other"
TRAINER = "trainer"
_MOST = 256


class ModelLabels:
    """Turns what callers call a model into one of few label values.

    A model of the catalogue is itself. All trainers are one, `trainer`: there can be any number, and their
    ids are nobody else's business. What is neither is nothing. Models come and go by whoever may load or
    publish some, so after 256 names the next ones are `other`.

    Args:
        kind_of: Says of an id whether it is in the catalogue: `catalogue`, `guest` for a trainer, or empty.
    """

    def __init__(self, kind_of: Callable[[str], str]) -> None:
        self._kind_of = kind_of
        self._seen: set[str] = set()

    def of(self, model_id: str) -> str:
        """Return the label value of an id; empty for what the catalogue does not have."""
        if model_id in self._seen:
            return model_id
        kind = self._kind_of(model_id) if model_id else ""
        if kind != "catalogue":
            return TRAINER if kind else ""
        if len(self._seen) >= _MOST:
            return OTHER
        self._seen.add(model_id)
        return model_id
