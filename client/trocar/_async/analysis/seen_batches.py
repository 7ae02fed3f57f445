"""Batches kept until their results are there, with asyncio; `tools/generate_sync.py` makes the sync ones."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from trocar._analysis.analysis_inputs import Samples
from trocar._base.concurrency import AsyncItems
from trocar._request.nested_inputs import copied

if TYPE_CHECKING:
    from typing import Self

    from trocar._analysis.analysis_inputs import AsyncBatches
    from trocar._request.inputs import Inputs


class AsyncSeenBatches:
    """Batches for a stream; each is kept until its result is there.

    The window of the stream bounds how many are kept.
    """

    def __init__(self, batches: AsyncBatches) -> None:
        self._items: AsyncItems[Inputs] = AsyncItems(batches)
        self._reuses_buffers = not isinstance(batches, Samples)
        self._seen: deque[Inputs] = deque()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Inputs:
        item = await self._items.next()
        if self._reuses_buffers:  # as an iterator may, which fills one array after the other
            item = copied(item)
        self._seen.append(item)
        return item

    def answered(self) -> Inputs:
        """Return the batch of the next result."""
        return self._seen.popleft()
