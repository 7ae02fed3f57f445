"""How much the tests of reliability do: the counts of CI, or more with the same code.

    CALLS = count(150)                     # 3,000 with RELIABILITY_SCALE=20, 15 in `make test`
    KILLS = count(25, "TROCAR_KILLS")      # or its own number

`RELIABILITY_SEED` is where their random choices begin.
"""

import os

SCALE = float(os.environ.get("RELIABILITY_SCALE", "1"))
"""What every count is multiplied by."""

SEED = int(os.environ.get("RELIABILITY_SEED", "0"))
"""Another one for other choices."""


def count(default: int, variable: str = "") -> int:
    """Return how often to do something.

    Args:
        default: In `make test-all`, which CI runs.
        variable: An environment variable with a number for this count alone.
    """
    own = os.environ.get(variable, "") if variable else ""
    return int(own) if own else max(1, round(default * SCALE))
