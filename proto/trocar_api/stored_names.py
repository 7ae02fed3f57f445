"""Names of what a server keeps (models, data sets, stored edits, directions), for both ends."""

import re

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,62}")


def is_stored_name(text: str) -> bool:
    """Whether a text can be a name: 1 to 63 of a-z, 0-9, `.`, `_` and `-`, the first a letter or digit."""
    return _NAME.fullmatch(text) is not None
