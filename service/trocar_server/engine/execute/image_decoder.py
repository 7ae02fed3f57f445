"""Image decoding in a few processes, shared fairly between callers. Belongs to one event loop.

# Note: [Decoding in separate processes]
No image is decoded in the server's own process: a decoder cannot be interrupted, and a decompression bomb
would block a thread until it is done. A separate process is killed on a deadline, a cancellation or a stop,
and a new one is started for the next image (0.06 s). One of them takes small images only, so that no number
of large ones delays the small ones of other callers. Callers get equal shares of pixels.
"""

import asyncio
import os
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, TypeVar

from PIL import Image

from trocar_api.reasons import ErrorReason
from trocar_server.decoding.headers import ImageHeader, read_header
from trocar_server.decoding.pixels import DEFAULT_CONVERSION, Conversion
from trocar_server.decoding.process import WorkerProcess, decode
from trocar_server.engine.execute.worker_pool import WorkerPool
from trocar_server.errors import ServiceError
from trocar_server.models import current_flow
from trocar_server.models.fitting import Fitting, Values

Result = TypeVar("Result")

MAX_DECODE_S = 30.0
"""Per image, from the start of its decoding."""
SMALL_PIXELS = 32 << 20
"""Pixels times scans of a small image: half a second of decoding, at most."""

_WORKER = "trocar_server.decoding.worker"
_MAX_PROCESSES = 4
_QUANTUM = 1 << 20


class ImageDecoder:
    """Decodes images in separate processes.

        decoder = ImageDecoder(Conversion())
        header = await decoder.aside(lambda: read_header(data, max_pixels))
        image = await decoder.decode(data, header, max_pixels)      # cancel it, and the process is killed
        decoder.stop()

    Args:
        conversion: How every image is converted to RGB.
    """

    def __init__(self, conversion: Conversion = DEFAULT_CONVERSION) -> None:
        self.conversion = conversion
        count = max(2, min(_MAX_PROCESSES, os.cpu_count() or 1))
        self._pool = WorkerPool(lambda: WorkerProcess(_WORKER), count, _QUANTUM, _stopping)
        self._aside = ThreadPoolExecutor(2, thread_name_prefix="trocar-pixels")
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def pids(self) -> list[int]:
        """The ids of the running processes."""
        return self._pool.pids

    async def aside(self, work: Callable[[], Result]) -> Result:
        """Run short and bounded work with images, on a dedicated thread."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work)

    async def decode(
        self, data: bytes | memoryview, header: ImageHeader, max_pixels: int, flow: str | None = None
    ) -> Image.Image:
        """Decode one image.

        Args:
            data: The encoded image.
            header: Its header, as `read_header` returns it.
            max_pixels: The most pixels of one image.
            flow: The flow that is charged; that of the current call when None.

        Raises:
            ServiceError: As `decode_image`; `IMAGE_TOO_LARGE`, it takes too long; `CANCELLED`, the server
                is stopping.
        """

        def work(process: WorkerProcess) -> Image.Image:
            width, height, pixels = decode(process, data, header, max_pixels, self.conversion)
            return Image.frombytes("RGB", (width, height), pixels)

        return await self._run(work, header, current_flow() if flow is None else flow)

    async def prepare(
        self,
        data: bytes | memoryview,
        header: ImageHeader,
        max_pixels: int,
        fitting: Fitting,
        steps: Sequence[Sequence[int]],
        row: Values,
    ) -> None:
        """Decode one image, and write the model's numbers for it.

        Args:
            data: The encoded image.
            header: Its header, as `read_header` returns it.
            max_pixels: The most pixels of one image.
            fitting: Of the model's preprocessing.
            steps: Its steps for the image as stored, and for the image turned.
            row: (3, height, width), float32; overwritten, also some time after a cancellation.

        Raises:
            ServiceError: As `decode`.
        """

        def work(process: WorkerProcess) -> None:
            _, _, pixels = decode(process, data, header, max_pixels, self.conversion, steps)
            fitting.fill(pixels, row)

        await self._run(work, header, current_flow())

    async def _run(self, work: Callable[[WorkerProcess], Result], header: ImageHeader, flow: str) -> Result:
        cost = header.scanned_pixels
        try:
            return await self._pool.run(work, cost, flow, MAX_DECODE_S, is_small=cost <= SMALL_PIXELS)
        except TimeoutError:
            raise ServiceError(
                ErrorReason.IMAGE_TOO_LARGE,
                f"the {header.format} image of {header.width} x {header.height} pixels takes longer than "
                f"{MAX_DECODE_S:g} s to decode; save it again, or send an array",
            ) from None

    def decode_from_thread(self, data: bytes, max_pixels: int, flow: str) -> Image.Image:
        """Decode one image from a thread other than the event loop's, blocking; see `attach`.

        Raises:
            ServiceError: As `decode`.
        """
        header = read_header(data, max_pixels)
        if self._loop is None or self._pool.is_stopped:
            raise _stopping()
        decoding = self.decode(data, header, max_pixels, flow)
        return asyncio.run_coroutine_threadsafe(decoding, self._loop).result()

    def attach(self) -> None:
        """Serve other threads too, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Kill every process; pending calls fail, and nothing is decoded afterwards."""
        self._pool.stop()
        self._aside.shutdown(wait=False)


@contextmanager
def naming_image(index: int) -> Iterator[None]:
    """Add an image's position in its batch to errors."""
    try:
        yield
    except ServiceError as error:
        details = {**error.details, "image": str(index)}
        raise ServiceError(error.reason, f"image {index}: {error.message}", **details) from error


async def in_order(work: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines concurrently and return their results; the first failure, in order, cancels the rest."""
    tasks = [asyncio.create_task(each) for each in work]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _stopping() -> ServiceError:
    return ServiceError(ErrorReason.CANCELLED, "the server is shutting down: the image was not decoded")
