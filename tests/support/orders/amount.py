"""How many orders are tried: a share in the ordinary run, all of them or any number on demand.

`TROCAR_ORDERS=0` tries every await of every call, another number that many of each;
`TROCAR_ORDERS_SEED` draws other ones.
"""

import os
from random import Random

AMOUNT = int(os.environ.get("TROCAR_ORDERS", "1"))
SEED = int(os.environ.get("TROCAR_ORDERS_SEED", "0"))


def drawn(most: int, *of: object) -> list[int]:
    """Draw some of the numbers 1 to `most`, in order; all of them with an amount of 0.

    Args:
        most: The largest.
        of: What they are drawn for: others get others.
    """
    if AMOUNT == 0 or most <= AMOUNT:
        return list(range(1, most + 1))
    return sorted(Random(f"{SEED} {of}").sample(range(1, most + 1), AMOUNT))
