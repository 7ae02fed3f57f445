"""Preparation of inputs: texts, sound and images become tensors, in other processes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import islice

from trocar_server.config import Limits
from trocar_server.decoding.pixels import Conversion
from trocar_server.engine.execute.arguments import decode_images, has_images
from trocar_server.engine.execute.binding import bound_inputs
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.execute.image_texts import ImageTextProcessor, takes_image_texts
from trocar_server.engine.execute.prepared_images import DecodedImages
from trocar_server.engine.execute.processor import Processed, Processor
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.request.plan import (
    ArgumentInput,
    Payload,
    Payloads,
    Plan,
    SourceInputs,
    payload_count,
)
from trocar_server.engine.resolve.text_positions import TokenizedTexts
from trocar_server.engine.resolve.text_spans import has_spans, with_token_rows
from trocar_server.engine.run.bound_call import Prepared
from trocar_server.engine.schedule.deadlines import until
from trocar_server.engine.schedule.room import Room
from trocar_server.models import HostedModel
from trocar_server.processing.inputs import ProcessorInput


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
        self._image_texts = ImageTextProcessor(self.processor, self.decoder)

    def attach(self) -> None:
        """Serve other threads too, on the running event loop."""
        self.decoder.attach()
        self.processor.attach()

    def stop(self) -> None:
        """Kill the processes; what waits for them fails."""
        self.decoder.stop()
        self.processor.stop()

    def needs_processing(self, hosted: HostedModel, plan: Plan | SourceInputs) -> bool:
        """Whether a plan, or one of its sources, has inputs for the model's own processor."""
        sources = plan.sources if isinstance(plan, Plan) else ()
        return (
            bool(plan.unprocessed)
            or takes_image_texts(hosted, plan.inputs, plan.unprocessed)
            or any(self.needs_processing(hosted, source) for source in sources)
        )

    async def process_inputs(
        self,
        hosted: HostedModel,
        inputs: Sequence[ArgumentInput],
        unprocessed: Sequence[ProcessorInput],
        payloads: Sequence[Payload],
        deadline: float | None = None,
        room: Room | None = None,
    ) -> Processed:
        """Turn the texts and sound of a pass, and images that go with texts, into arguments.

        Args:
            hosted: The model.
            inputs: The other inputs.
            unprocessed: Texts and sound.
            payloads: Those of all inputs; of images none in a dry run.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call; grows by the bytes of the arguments.

        Raises:
            ServiceError: As `Processor.process` and `ImageTextProcessor.process` do.
        """
        both = takes_image_texts(hosted, inputs, unprocessed)
        if not (both or unprocessed):
            return Processed(tuple(inputs), list(payloads), (), 0)
        process = (self._image_texts if both else self.processor).process
        return await process(hosted, inputs, unprocessed, payloads, self._limits(), deadline, room)

    async def process(
        self,
        hosted: HostedModel,
        plan: Plan,
        payloads: Payloads,
        deadline: float | None = None,
        room: Room | None = None,
    ) -> tuple[Plan, Payloads]:
        """Turn inputs of a plan, and of its sources, into arguments; see `process_inputs`.

        Args:
            hosted: The model.
            plan: The plan; not yet checked against the model.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call; grows by the bytes of the arguments.

        Returns:
            The plan and payloads of the pass.

        Raises:
            ServiceError: As `process_inputs` does.
        """

        async def processed(given: Plan | SourceInputs, own: Sequence[Payload]) -> Processed:
            return await self.process_inputs(hosted, given.inputs, given.unprocessed, own, deadline, room)

        main = await processed(plan, payloads.inputs)
        pairs = zip(plan.sources, payloads.sources, strict=True)
        others = [await processed(source, own) for source, own in pairs]
        sources = tuple(
            SourceInputs(source.name, other.inputs)
            for source, other in zip(plan.sources, others, strict=True)
        )
        if has_spans(plan):
            arrays = _arrays(hosted, plan, main)
            plan = await asyncio.to_thread(with_token_rows, plan, plan.unprocessed, main.made, arrays)
        plan = replace(plan, inputs=main.inputs, unprocessed=(), processed=main.made, sources=sources)
        return plan, replace(payloads, inputs=main.payloads, sources=[other.payloads for other in others])

    async def prepare(
        self,
        checked: CheckedPlan,
        payloads: Payloads,
        deadline: float | None = None,
        room: Room | None = None,
    ) -> Prepared:
        """Decode the images of a checked plan, and of its sources.

        Args:
            checked: The checked plan.
            payloads: Its payloads.
            deadline: A time of `time.monotonic()` in seconds, or None.
            room: Of the call, for the bytes of decoded and prepared images.

        Raises:
            ServiceError: `INVALID_IMAGE` or `IMAGE_TOO_LARGE`, naming the image's position; `SERVER_BUSY`;
                `DEADLINE_EXCEEDED`.
        """
        if not checked.has_images:
            return Prepared(checked, payloads, *checked.no_images)
        hosted, plan = checked.deployment.hosted, checked.plan
        room = Room() if room is None else room
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
    ) -> list[DecodedImages]:
        """Decode the images of arguments; see `decode_images`."""
        if not has_images(inputs):
            return [[] for _ in inputs]
        return await decode_images(hosted, inputs, payloads, self._limits(), self.decoder, reserve)


def _arrays(hosted: HostedModel, plan: Plan, main: Processed) -> TokenizedTexts | None:
    """Return the texts of a plan that were sent as arrays; None without any."""
    if plan.start_at is not None or not plan.has_positions:
        return None
    inputs, remaining = bound_inputs(hosted, main.inputs), iter(main.payloads)
    given = {entry.name: list(islice(remaining, payload_count(entry))) for entry in inputs}
    return TokenizedTexts.of_arrays(inputs, given)
