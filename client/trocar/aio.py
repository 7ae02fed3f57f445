"""The asyncio client: the same names as in `trocar`, with `await`.

    async with trocar.aio.connect("localhost:50051") as client:
        maps = await client.extract("resnet50", images, taps=["layer4"])

Call `connect` inside a coroutine: the client belongs to the running event loop. Inputs are converted
(files read, PIL images decoded) in that loop's thread.
"""

from trocar._async.client import AsyncClient, connect
from trocar._async.fits import AsyncTrainer
from trocar._async.prepared import AsyncPreparedExtraction
from trocar._async.stream import AsyncExtractStream

__all__ = ["AsyncClient", "AsyncExtractStream", "AsyncPreparedExtraction", "AsyncTrainer", "connect"]
