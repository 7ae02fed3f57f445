"""Preparation of inputs: texts, sound and images become tensors, in other processes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from PIL import Image

from trocar_server.config import Limits
from trocar_server.decoding.pixels import Conversion
from trocar_server.engine.execute.arguments import decode_images, has_images
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.execute.processor import Processed, Processor
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.request.plan import ArgumentInput, Payload, Payloads, Plan, SourceInputs
from trocar_server.engine.resolve.text_spans import has_spans, with_token_rows
from trocar_server.engine.run.run_plan import Prepared
from trocar_server.engine.schedule.admission import Reservation
from trocar_server.engine.schedule.deadlines import until
from trocar_server.models import HostedModel


@dataclass
class _Room:
    """The share of a reservation that one call's images take."""

    reservation: Reservation | None
    is_alone: bool
    byte_count: int = 0

    def reserve(self, byte_count: int, rows: int) -> None:
        if self.reservation is not None:
            self.reservation.reserve(byte_count, rows, is_alone=self.is_alone)
            self.byte_count += byte_count

    def give_back(self) -> None:
        if self.reservation is not None:
            self.reservation.add(-self.byte_count)


class Preparation:
    """Processes texts and sound, and decodes images. Belongs to one event loop.

    Args:
        limits: Returns the current limits of a call.
        conversion: How images are converted to RGB.

    Attributes:
        decoder: The processes that decode images.
        processor: The processes that run models' processors.
    """

    def __init__(self, limits: Callable[[], Limits], conversion: Conversion) -> None:
        self._limits = limits
        self.decoder = ImageDecoder(conversion)
        self.processor = Processor()

    def attach(self) -> None:
        """Serve other threads too, on the running event loop."""
        self.decoder.attach()
        self.processor.attach()

    def stop(self) -> None:
        """Kill the processes; what waits for them fails."""
        self.decoder.stop()
        self.processor.stop()

    async def process(
        self,
        hosted: HostedModel,
        plan: Plan,
        payloads: Payloads,
        deadline: float | None = None,
        reservation: Reservation | None = None,
    ) -> tuple[Plan, Payloads]:
        """Turn the texts and sound of a plan, and of its sources, into arguments.

        Args:
            hosted: The model.
            plan: The plan; not yet checked against the model.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            reservation: Grows by the bytes of the arguments.

        Returns:
            The plan and payloads of the pass.

        Raises:
            ServiceError: As `Processor.process` does.
        """

        async def processed(given: Plan | SourceInputs, own: Sequence[Payload]) -> Processed:
            if not given.unprocessed:
                return Processed(given.inputs, list(own), (), 0)
            return await self.processor.process(
                hosted, given.inputs, given.unprocessed, own, self._limits(), deadline, reservation
            )

        main = await processed(plan, payloads.inputs)
        pairs = zip(plan.sources, payloads.sources, strict=True)
        others = [await processed(source, own) for source, own in pairs]
        sources = tuple(
            SourceInputs(source.name, other.inputs)
            for source, other in zip(plan.sources, others, strict=True)
        )
        if has_spans(plan):
            plan = await asyncio.to_thread(with_token_rows, plan, plan.unprocessed, main.made)
        plan = replace(plan, inputs=main.inputs, unprocessed=(), processed=main.made, sources=sources)
        return plan, replace(payloads, inputs=main.payloads, sources=[other.payloads for other in others])

    async def prepare(
        self,
        checked: CheckedPlan,
        payloads: Payloads,
        deadline: float | None = None,
        reservation: Reservation | None = None,
        *,
        is_alone: bool = False,
    ) -> Prepared:
        """Decode the images of a checked plan, and of its sources.

        Args:
            checked: The checked plan.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            reservation: The reservation for the bytes of decoded and prepared images.
            is_alone: As for `Reservation.reserve`.

        Raises:
            ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position; `SERVER_BUSY`;
                `DEADLINE_EXCEEDED`.
        """
        if not checked.has_images:
            return Prepared(checked, payloads, *checked.no_images)
        hosted, plan = checked.deployment.hosted, checked.plan
        room = _Room(reservation, is_alone)
        try:
            async with until(deadline, "the images were decoded"):
                images = await self.decode(hosted, plan.inputs, payloads.inputs, room.reserve)
                sources = zip(plan.sources, payloads.sources, strict=True)
                of_sources = [
                    await self.decode(hosted, source.inputs, own, room.reserve) for source, own in sources
                ]
        except BaseException:
            room.give_back()
            raise
        return Prepared(checked, payloads, images, of_sources, room.byte_count)

    async def decode(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        payloads: Sequence[Payload],
        reserve: Callable[[int, int], None],
    ) -> list[list[Image.Image]]:
        """Decode the images of arguments; see `decode_images`."""
        if not has_images(inputs):
            return [[] for _ in inputs]
        return await decode_images(hosted, inputs, payloads, self._limits(), self.decoder, reserve)
