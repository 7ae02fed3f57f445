"""Directions: fitted on the server, listed, fetched, stored and deleted, with asyncio."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from trocar._analysis.analysis_inputs import Samples, batches_of, unwrapped
from trocar._analysis.direction_scores import DirectionScores
from trocar._async.members import merged
from trocar._async.replicas import AsyncRoutedStreams
from trocar._async.stream import AsyncExtractStream
from trocar._base.call_options import over
from trocar._base.input_kinds import is_path
from trocar._base.tables import Listing
from trocar._request.execution import execution_of
from trocar._request.stored.direction_fits import (
    check_direction_name,
    direction_fit,
    needs_labels,
)
from trocar._request.taps import Tap, tap
from trocar._result.directions import DIRECTION_COLUMNS, Direction
from trocar._transport.channel import new_request_id
from trocar._wire.direction_messages import stored_direction
from trocar._wire.stored_datasets import StoredDataset
from trocar._wire.stream_messages import StreamOptions
from trocar.errors import UnknownDirectionError
from trocar_api.v1 import direction_pb2

if TYPE_CHECKING:
    from collections.abc import Sequence

    from trocar._analysis.analysis_inputs import AsyncBatches, AsyncInputSet
    from trocar._async.connection import AsyncConnection
    from trocar._base.call_options import CallOptions
    from trocar._request.stored.direction_fits import ClassWeight, DirectionKind
    from trocar._request.text_positions import TextPositions
    from trocar._result.directions import StoredDirection

_WINDOW = 4


class AsyncDirections:
    """Directions of a caller, over one connection."""

    def __init__(self, connection: AsyncConnection) -> None:
        self._connection = connection

    async def fit_direction(  # noqa: PLR0913 - options of one call, by keyword
        self,
        model_id: str,
        data: AsyncInputSet,
        labels: object = None,
        taps: str | Tap | Sequence[str | Tap] = ("layer[*]",),
        *,
        name: str | None = None,
        kind: DirectionKind = "logistic",
        folds: int | Sequence[int] = 5,
        groups: object = None,
        positions: TextPositions | None = None,
        l2: float = 1.0,
        class_weight: ClassWeight | None = None,
        standardize: bool | None = None,
        k: int = 1,
        target: str = "",
        replace: bool = False,
        batch_size: int = 32,
        options: CallOptions | None = None,
    ) -> DirectionScores:
        """Fit a direction at each of many places, in one pass over the data; the values stay on the server.

            fitted = await client.fit_direction("vit", images, labels, taps=["layer[*]"], name="cats")
            fitted.best.place                # the layer that tells the classes apart best
            await client.extract("vit", images, [trocar.readout("cats", fitted.best.place)])

        Each value is averaged over its positions, without padding: one vector for each sample. Vectors and
        scores equal scikit-learn's for these; everything is float64.

        Args:
            model_id: The id of a loaded model.
            data: A folder, a list of images or texts, an array, or an iterable of batches; see the analysis
                page.
            labels: The class of each sample, in the order of `data`; numbers for ridge. Of a folder with
                subfolders when None: the name of the subfolder.
            taps: The places: selectors, `layer[*]` for all blocks.
            name: Under which they are stored: small letters, digits and `._-`. A new one when None; it is
                `name` of the result.
            kind: "logistic" (one vector for two classes, otherwise one for each class), "ridge",
                "mean_difference" (the second class minus the first, in sorted order), or "pca" without
                labels.
            folds: The number of folds for the scores, 0 for none; or the fold of each sample. Those of
                scikit-learn's `StratifiedKFold`, of `KFold` for ridge, and of `GroupKFold` with groups.
            groups: The group of each sample, such as a person or a document; a group is in one fold.
            positions: Only these positions of the texts, for example `trocar.positions(prompt=[-1])`.
            l2: Penalty of logistic and ridge: 1 / C and alpha of scikit-learn.
            class_weight: "balanced", or a weight for each class, for logistic.
            standardize: Whether channels are divided by their standard deviation for the fit of logistic and
                ridge, as by default; the vectors are for values as they are in any case.
            k: The number of components, for pca.
            target: The target of a data set on the server, where it has several.
            replace: Whether stored directions of this name may be replaced.
            batch_size: The most samples in one pass, unless the data are batches.
            options: As in `extract`, for every batch.

        Returns:
            The stored direction of each place, with its scores; prints as a table and plots.

        Raises:
            DirectionRejectedError: Labels of one class, a group in several folds, more directions than
                samples, or values that exceed the server's budget on disk.
            DirectionExistsError: The name is taken, and `replace` is False.
            ValueError: Labels, groups or folds are not as many as samples, or an option has no meaning here.
            FileNotFoundError: There is no such file or folder.
            TrocarError: As `extract`; a note names the batch.
        """
        stored = data if isinstance(data, StoredDataset) else None
        batches = batches_of(data, batch_size)
        if labels is None and needs_labels(kind) and stored is None:
            labels = _labels_of_folder(data, batches)
        message = direction_fit(
            name=name,
            kind=kind,
            sample_count=0 if stored is not None else _sample_count(batches, labels),
            labels=labels,
            folds=folds,
            groups=groups,
            l2=l2,
            class_weight=class_weight,
            standardize=standardize,
            k=k,
            replace=replace,
        )
        if stored is not None:
            message.dataset_id, message.dataset_target = stored.dataset_id, target
        chosen = [taps] if isinstance(taps, (str, Tap)) else list(taps)
        if positions is not None:
            chosen = [tap(each, positions=positions) if isinstance(each, str) else each for each in chosen]
        return await self._fit(model_id, batches, chosen, message, options)

    async def _fit(
        self,
        model_id: str,
        batches: AsyncBatches,
        taps: Sequence[str | Tap],
        message: direction_pb2.DirectionFit,
        options: CallOptions | None,
    ) -> DirectionScores:
        connection = await self._connection.home()
        how = connection.options.calls if options is None else over(options, connection.options.calls)
        timeout_s = connection.timeout(how.timeout_s)
        wanted = StreamOptions(
            model_id,
            taps,
            0,
            timeout_s,
            _WINDOW,
            execution=execution_of(how),
            direction_fit=message,
        )
        calls = AsyncRoutedStreams(connection, model_id, new_request_id(), timeout_s)
        async with AsyncExtractStream(calls, wanted, batches) as stream:
            async for result in stream:
                unwrapped(result, batches, model_id)
            fitted = tuple(map(stored_direction, stream.directions))
        await self._store_elsewhere(connection, fitted)
        return DirectionScores(fitted)

    async def _store_elsewhere(self, home: AsyncConnection, fitted: Sequence[StoredDirection]) -> None:
        """Store what one of several servers has fitted on the others, as stored edits are on all."""

        async def ask(one: AsyncConnection) -> None:
            if one is home:
                return
            for each in fitted:
                wanted = direction_pb2.GetDirectionRequest(
                    model_id=each.model_id, name=each.name, place=each.place
                )
                reply = await home.call(home.direction_service.GetDirection, wanted)
                request = direction_pb2.StoreDirectionRequest(
                    model_id=each.model_id,
                    name=each.name,
                    place=each.place,
                    file=reply.file,
                    is_replacing=True,
                )
                await one.call(one.direction_service.StoreDirection, request)

        await self._connection.everywhere(ask)

    async def directions(self, model_id: str | None = None) -> list[StoredDirection]:
        """Return your stored directions, by model and name, each place an entry.

        Args:
            model_id: Only directions of this model; all when None.
        """
        request = direction_pb2.ListDirectionsRequest(model_id=model_id or "")

        async def ask(one: AsyncConnection) -> list[StoredDirection]:
            reply = await one.call(one.direction_service.ListDirections, request)
            return [stored_direction(message) for message in reply.directions]

        result = merged(
            await self._connection.everywhere(ask),
            lambda stored: (stored.model_id, stored.name, stored.place),
        )
        return Listing(result, DIRECTION_COLUMNS)

    async def direction(self, model_id: str, name: str, at: str = "") -> Direction:
        """Return a stored direction with its vectors.

        Args:
            model_id: The model.
            name: Its name.
            at: Its place; may be left out where there is one of this name.

        Raises:
            UnknownDirectionError: You have stored no direction of this name for the model.
            DirectionMismatchError: It was not fitted at this place.
        """
        request = direction_pb2.GetDirectionRequest(model_id=model_id, name=name, place=at)
        connection = self._connection
        reply = await connection.call(connection.direction_service.GetDirection, request)
        return Direction.from_bytes(reply.file)

    async def store_direction(
        self, model_id: str, name: str, at: str, direction: Direction, *, replace: bool = False
    ) -> StoredDirection:
        """Store a direction from elsewhere on the server (on each of several servers).

            vector = Direction.of(numpy_vector)
            await client.store_direction("llama", "polite", "layer[12]", vector)

        Args:
            model_id: The id of a loaded model; the direction is checked against the place's channels.
            name: Small letters, digits and `._-`, at most 63 characters.
            at: A selector of the place.
            direction: Its vectors, at most 4 MiB.
            replace: Whether a direction of this name and place may be replaced.

        Raises:
            DirectionExistsError: There is one, and `replace` is False.
            DirectionMismatchError: The direction was fitted on another model.
            SelectorError: The place does not exist; see its subclasses.
            ReductionRejectedError: The place has other channels.
            ValueError: `name` cannot be a name.
        """
        request = direction_pb2.StoreDirectionRequest(
            model_id=model_id,
            name=check_direction_name(name),
            place=at,
            file=direction.to_bytes(),
            is_replacing=replace,
        )

        async def ask(one: AsyncConnection) -> StoredDirection:
            return stored_direction((await one.call(one.direction_service.StoreDirection, request)).direction)

        return (await self._connection.everywhere(ask))[0]

    async def delete_directions(self, model_id: str, name: str) -> None:
        """Delete the directions of one name, at all places; running calls that use them are not affected.

        Args:
            model_id: The model.
            name: Their name.

        Raises:
            UnknownDirectionError: You have stored no direction of this name for the model.
            ValueError: `name` cannot be a name.
        """
        request = direction_pb2.DeleteDirectionsRequest(model_id=model_id, name=check_direction_name(name))

        async def delete(one: AsyncConnection) -> object:
            return await one.call(one.direction_service.DeleteDirections, request)

        await self._connection.delete_everywhere(delete, UnknownDirectionError)


def _sample_count(batches: AsyncBatches, labels: object) -> int:
    """Return the number of samples.

    Raises:
        ValueError: Neither the batches nor the labels tell it.
    """
    if isinstance(batches, Samples):
        return batches.count
    try:
        return len(labels)  # type: ignore[arg-type]
    except TypeError:
        raise ValueError(
            "batches without labels do not tell how many samples there are; give a list"
        ) from None


def _labels_of_folder(data: object, batches: AsyncBatches) -> list[str] | None:
    """Return the subfolder of each file of a folder; None where the data are no folder of folders."""
    if not (is_path(data) and isinstance(batches, Samples) and Path(str(data)).is_dir()):
        return None
    files = [Path(each).relative_to(Path(str(data))) for each in batches.take(0, batches.count)]
    return None if any(len(file.parts) < 2 for file in files) else [file.parts[0] for file in files]
