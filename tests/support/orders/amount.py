"""How many orders are tried: a share in the ordinary run, all of them or any number on demand.

`TROCAR_ORDERS=0` tries every await of every call with every event, another number that many awaits with each
event; without it one event and one await are drawn for each call. `TROCAR_ORDERS_SEED` draws
others.
"""

import os
from collections.abc import Sequence
from random import Random
from typing import TypeVar

Item = TypeVar("Item")

AMOUNT = int(os.environ.get("TROCAR_ORDERS", "-1"))
SEED = int(os.environ.get("TROCAR_ORDERS_SEED", "0"))
_ORDINARY = 1


def pairs(events: Sequence[Item], await_count: int, of: str) -> list[tuple[Item, int]]:
    """Draw pairs of an event and the number of an await, from 1.

    Args:
        events: The events.
        await_count: The number of awaits.
        of: What they are drawn for: others get others.
    """
    random = Random(f"{SEED} {of}")
    numbers = range(1, await_count + 1)
    if AMOUNT < 0:
        return random.sample([(event, at) for event in events for at in numbers], _ORDINARY)
    most = min(AMOUNT or await_count, await_count)
    return [(event, at) for event in events for at in sorted(random.sample(numbers, most))]
