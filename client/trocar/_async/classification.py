"""Classification with asyncio: classes of samples by name, before and after edits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trocar._analysis.analysis_inputs import batches_of, sample_labels, unwrapped
from trocar._analysis.analysis_taps import as_taps, with_output
from trocar._analysis.comparison import ClassChangeCollector, edited
from trocar._analysis.diff import check_tolerance, without_copy
from trocar._analysis.diff_collector import DiffCollector
from trocar._analysis.ordering import EVERYTHING
from trocar._analysis.prediction import (
    OUTPUT,
    NextTokenCollector,
    PredictionCollector,
    check_activation,
    check_top,
    class_output,
    next_scores,
    next_token_output,
    next_token_tap,
)
from trocar._async.analysis.analysis_passes import executed, side_by_side
from trocar._request.taps import lens, tap
from trocar.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._analysis.analysis_inputs import AsyncBatches, AsyncInputSet
    from trocar._analysis.comparison import Comparison
    from trocar._analysis.prediction import Activation, ClassOutput, Predictions
    from trocar._async.extraction import AsyncExtraction
    from trocar._async.models import AsyncModels
    from trocar._base.call_options import CallOptions
    from trocar._request.edits import Edit
    from trocar._request.taps import Tap
    from trocar._result.feature_maps import FeatureMaps


class AsyncClassification:
    """Classes of samples by name.

    Args:
        extraction: Makes the passes.
        models: Describes the model: the names of its classes.
    """

    def __init__(self, extraction: AsyncExtraction, models: AsyncModels) -> None:
        self._extraction = extraction
        self._models = models

    async def predict(
        self,
        model_id: str,
        inputs: AsyncInputSet,
        *,
        top: int = 5,
        activation: Activation = "softmax",
        edits: str | Edit | Sequence[str | Edit] = (),
        batch_size: int = 32,
        options: CallOptions | None = None,
    ) -> Predictions:
        """Return the best classes of each sample by name, with their scores.

            found = await client.predict("resnet50", ["cat.jpg", "dog.jpg"])
            found[0].name, found[0].score

        Args:
            model_id: The id of a loaded model that classifies: one output of shape (batch, classes), or one
                that is called `logits`; or of a causal language model, whose classes are the tokens that
                may follow each text.
            inputs: One input as in `extract`, a folder, a list of images or texts, an array, or an iterable
                of batches; see the analysis page.
            top: Number of classes for each sample; all if the model has fewer.
            activation: How scores are computed from the model's output, in float64: "softmax" over the
                classes, if one is right; "sigmoid" of each, if several may be right; "none" for a model whose
                output is already probabilities, or for the unchanged output.
            edits: Changes during the pass, as in `extract`.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.
            options: As in `extract`.

        Returns:
            A row for each sample, best class first; prints as a table. Names are empty if the server knows
            none.

        Raises:
            ValueError: The model's output is not class scores (the message tells what it is); the output is
                not finite; `top` is not a positive number; or there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        batches = batches_of(inputs, batch_size)
        output = await self.output(model_id, allow_tokens=True)
        if output.is_of_tokens:
            return await self._next_tokens(output, batches, top, activation, edits, options)
        collector = PredictionCollector(output, top, activation)
        async with self._extraction.extract_stream(
            model_id, batches, output.selector, edits=edits, options=options
        ) as stream:
            async for result in stream:
                (values,) = unwrapped(result, batches, model_id).values()
                collector.add(values, sample_labels(batches, result.index))
        return collector.result()

    async def compare(  # noqa: PLR0913 - options of one analysis, by keyword
        self,
        model_id: str,
        inputs: AsyncInputSet,
        *,
        edits: str | Edit | Sequence[str | Edit] = (),
        other: str | None = None,
        taps: str | Tap | Sequence[str | Tap] | None = None,
        top: int = 5,
        activation: Activation = "softmax",
        tolerance: float = 1e-5,
        batch_size: int = 32,
    ) -> Comparison:
        """Compare a model with itself after an edit, or with another model, on the same inputs.

            found = await client.compare("resnet50", "photos/", edits=trocar.edit("layer3", "zero"))
            found.changed                    # samples whose best class changed
            found["layer4"].relative_error

        Args:
            model_id: The id of a loaded model, for `before`.
            inputs: As in `predict`.
            edits: Edits for `after`, as in `extract`.
            other: Another model for `after`, with the edits if there are any. The same model when None.
            taps: The values to compare, paired by name; those of every module when None. All values are sent,
                so name some for a large model.
            top: Number of classes in `before` and `after` for each sample.
            activation: As in `predict`.
            tolerance: Relative error up to which feature maps count as equal.
            batch_size: The maximum number of samples in one pass, unless the inputs are batches.

        Returns:
            The differences of the values as in `diff`, including the output (unless a tap has the same
            values), and the change of the best class of each sample; without classes if an output is not
            class scores, or is not finite. Outputs of different names are one row, with the name in the
            first model. Prints as tables and plots. Columns are called before and after, or like the two
            models.

        Raises:
            ValueError: There is neither an edit nor another model, `tolerance` or `top` is out of range, or
                there are no inputs.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch and the model.
        """
        if not edits and other is None:
            raise ValueError(
                "compare needs a difference: edits=trocar.edit(...), or other= with another model"
            )
        limit, batches = check_tolerance(tolerance), batches_of(inputs, batch_size)
        models = (model_id, other or model_id)
        outputs, changes = await self._sides(models, top, activation)
        at = [output.selector if output else OUTPUT for output in outputs]
        order = await executed(self._extraction, model_id)
        chosen = as_taps(taps) if taps is not None else [tap(EVERYTHING)] if order else []
        is_asked = taps is None or any(at[0] in (item.alias, item.selector) for item in chosen)
        taps_a, taps_b = (with_output(chosen, one) if outputs[0] or not chosen else chosen for one in at)
        is_other = at[0] != at[1]
        collector = DiffCollector(taps_a, taps_b, (at[0], at[1])) if is_other else DiffCollector(taps_a)

        def add(maps_a: FeatureMaps, maps_b: FeatureMaps) -> None:
            labels = sample_labels(batches, collector.batch_count)
            before, after = maps_a.get(at[0]), maps_b.get(at[1])
            if of_tokens:
                (before, *texts_a, maps_a), (after, *texts_b, maps_b) = (
                    next_scores(maps, one) for maps, one in zip((maps_a, maps_b), at, strict=True)
                )
                changes.spell(*texts_a, *texts_b)
            collector.add(maps_a, maps_b)
            changes.add(before, after, labels)

        of_tokens = [next_token_tap(one, top) for one in outputs if one is not None and one.is_of_tokens]
        sides = zip((collector.taps_a, collector.taps_b), of_tokens or (None, None), strict=True)
        asked_a, asked_b = ([*listed, *([extra] if extra else [])] for listed, extra in sides)
        await side_by_side(self._extraction, models, batches, (asked_a, asked_b), add, ((), edits))
        names = (model_id, edited(models[1]) if edits else models[1])
        outcome = collector.result(*names, limit, order)
        return changes.result(outcome if is_asked else without_copy(outcome, at[0]))

    async def _sides(
        self, models: tuple[str, str], top: int, activation: Activation
    ) -> tuple[tuple[ClassOutput | None, ClassOutput | None], ClassChangeCollector]:
        """Return where the scores of both models are, and what collects their classes."""
        check_top(top)
        check_activation(activation)
        try:
            first = await self.output(models[0], allow_tokens=True)
            is_one = models[0] == models[1]
            second = first if is_one else await self.output(models[1], allow_tokens=True)
            if first.is_of_tokens != second.is_of_tokens:
                raise ValueError("one model scores classes, and the other the next token")
            sides = [PredictionCollector(output, top, activation) for output in (first, second)]
        except ValueError as error:
            return (None, None), ClassChangeCollector(None, None, f"no classes are compared: {error}")
        return (first, second), ClassChangeCollector(sides[0], sides[1])

    async def _next_tokens(
        self,
        output: ClassOutput,
        batches: AsyncBatches,
        top: int,
        activation: Activation,
        edits: str | Edit | Sequence[str | Edit],
        options: CallOptions | None,
    ) -> Predictions:
        """Return the most likely tokens behind each text."""
        collector = NextTokenCollector(output, activation)
        async with self._extraction.extract_stream(
            output.model_id, batches, next_token_tap(output, top), edits=edits, options=options
        ) as stream:
            async for result in stream:
                maps = unwrapped(result, batches, output.model_id)
                collector.add(maps, sample_labels(batches, result.index))
        return collector.result()

    async def output(self, model_id: str, *, allow_tokens: bool = False) -> ClassOutput:
        """Return the place of a model's scores.

        Args:
            model_id: The model.
            allow_tokens: Whether they may be of the next token.

        Raises:
            ValueError: Its output is not class scores.
        """
        model = await self._models.model(model_id)
        plan = await self._extraction.plan(model_id, None, OUTPUT)
        tokens = next_token_output(model_id, plan) if allow_tokens else None
        try:
            return class_output(model, plan)
        except ValueError as error:
            if tokens is None:
                raise
            try:
                await self._extraction.plan(model_id, None, lens(tokens.selector, top_k=1))
            except InvalidArgumentError:
                raise error from None
            return tokens
