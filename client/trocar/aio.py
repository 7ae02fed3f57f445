"""The asyncio client: the same names as in `trocar`, with `await`.

    async with trocar.aio.connect("localhost:50051") as client:
        maps = await client.extract("resnet50", images, taps=["layer4"])

Converting inputs (reading files, decoding PIL images) happens in the event loop's thread.
"""

from trocar._aio import AsyncClient, connect

__all__ = ["AsyncClient", "connect"]
