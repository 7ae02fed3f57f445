"""Gradients with asyncio: one forward and one backward pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._base.call_options import over
from trocar._request.execution import execution_of
from trocar._request.objectives import as_objective
from trocar._request.surgery import make_surgery
from trocar._wire.replies import ReplyAssembler
from trocar._wire.requests import extract_call, gradient_taps

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from trocar._async.connection import AsyncConnection
    from trocar._async.extraction import AsyncExtraction
    from trocar._base.call_options import CallOptions
    from trocar._base.tensors import Array
    from trocar._request.edits import Edit
    from trocar._request.inputs import Inputs
    from trocar._request.objectives import Objective
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps


class AsyncGradients:
    """Gradients at any place of a model.

    Args:
        connection: The connection.
        extraction: Makes the calls.
    """

    def __init__(self, connection: AsyncConnection, extraction: AsyncExtraction) -> None:
        self._defaults = connection.options.calls
        self._extraction = extraction

    async def gradients(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        inputs: Inputs | None,
        *,
        of: Objective,
        at: str | Tap | Sequence[str | Tap] = "/in",
        taps: str | Tap | Sequence[str | Tap] = (),
        edits: str | Edit | Sequence[str | Edit] = (),
        sources: Mapping[str, Inputs] | None = None,
        out: Mapping[str, Array] | None = None,
        adapter: str = "",
        options: CallOptions | None = None,
    ) -> FeatureMaps:
        """Run one forward and one backward pass and return gradients at any number of places.

            grads = await client.gradients("resnet50", images, of=trocar.logit(207), at=["layer4", "/in"])
            grads["layer4"]                  # numpy array (8, 2048, 7, 7), also as "layer4/grad_out"
            grads.objective                  # the logits of class 207, summed over the samples

        The name of a gradient includes its port: "layer4/grad_out", "/grad_in", "fc/param_grad(weight)"; or
        it is its alias. The selector in `at` is also a key, if it matches one gradient. If `taps` has
        collected a value of that name, the key means the value, and the gradient has only its full name.
        `grads.info[name].is_gradient` distinguishes them.

        Args:
            model_id: The id of a loaded model.
            inputs: As in `extract`. For images, "/in" is the preprocessed input.
            of: The objective: `trocar.logit(207)`, `trocar.value(...)`, `trocar.loss(...)` and so on, or a
                weighted sum of these.
            at: Selectors of the values whose gradients to return: "layer4", "fc/in", "/in" (the model's own
                input), "fc/param(weight)", "**/param(*)". `tap(...)` for statistics and reductions of a
                gradient: `tap("layer4", stats="l2", values=False)`.
            taps: Values of the same pass to collect as well.
            edits: As in `extract`; an edit of a port such as "relu@0/grad_out" changes the gradient in the
                backward pass.
            sources: As in `extract`.
            out: As in `extract`.
            adapter: As in `extract`.
            options: As in `extract`; gradients are exact, and lose the same precision as values on the wire.

        Returns:
            The gradients by name, each of its value's shape, then the values of `taps`.

        Raises:
            NotDifferentiableError: There is no gradient at a place, or it has no influence on the objective.
            ObjectiveOutOfRangeError: The objective names a class that the model does not have.
            ObjectiveRejectedError: The objective does not fit its values.
            TrocarError: As `extract`; a pass with gradients needs more memory.
            TypeError: `of` is not an objective.
            ValueError: `at` is empty.
        """
        surgery, wanted = make_surgery(edits, as_objective(of), sources), gradient_taps(at, taps)
        how = self._defaults if options is None else over(options, self._defaults)
        request = extract_call(
            model_id,
            inputs,
            wanted,
            how.chunk_bytes,
            surgery=surgery,
            execution=execution_of(how),
            wire=how.wire,
            adapter=adapter,
        )
        reply = ReplyAssembler(
            model_id, out, objective_offset=surgery.objective_offset, widens=how.wire is not None
        )
        return await self._extraction.collect(request, reply, how.timeout_s, how.cache)
