"""Fit of directions in a stream: the values of its batches stay on the server, and directions leave it.

fitting = await fits.begin(start, plan, principal)
await fitting.add(extraction)              # after each batch
directions = await fitting.finish()
await fitting.close()
"""

import asyncio
import threading
from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_api.v1 import direction_pb2 as pb
from trocar_api.v1 import stream_pb2
from trocar_server.directions import (
    Direction,
    DirectionRequest,
    DirectionStore,
    PooledValues,
    PooledValuesBudget,
    StoredDirections,
    fit_place,
)
from trocar_server.directions.direction_request import rejected
from trocar_server.directions.direction_store import check_name
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.plan import Plan, TapRequest
from trocar_server.engine.run.extraction import Extraction
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.fields import invalid
from trocar_server.rpc.codec.stored.directions import direction_request, directions_to_wire
from trocar_server.rpc.services.dataset_targets import with_targets
from trocar_server.tensors.reductions import PooledNorm, Positions
from trocar_server.training.datasets import DatasetLibrary

_REFUSED = ("start_at", "edits", "has_running_statistics", "adapter", "first_batch_index")
"""Fields of a stream's start that a fit does not take, beside the objective."""


class DirectionFits:
    """What fits of directions share.

    Args:
        engine: Computes the values.
        store: Gets the directions.
        datasets: The data sets on the server.
        folder: For pooled values.
    """

    def __init__(self, engine: Engine, store: DirectionStore, datasets: DatasetLibrary, folder: Path) -> None:
        self.engine, self.store, self.datasets, self.folder = engine, store, datasets, folder
        self._budget = PooledValuesBudget(engine.limits.max_direction_fit_bytes)

    @property
    def budget(self) -> PooledValuesBudget:
        """The budget on disk; a reloaded configuration changes its size."""
        self._budget.max_bytes = self.engine.limits.max_direction_fit_bytes
        return self._budget

    async def begin(
        self, start: stream_pb2.ExtractStreamStart, plan: Plan, principal: str
    ) -> "DirectionFitting":
        """Check a fit before anything is computed, and reserve its room on the disk.

        Args:
            start: Of the stream.
            plan: Of its batches, from `fit_plan`.
            principal: The caller.

        Raises:
            ServiceError: `DIRECTION_REJECTED`, `DIRECTION_EXISTS`, and the errors of plans.
        """
        message = start.direction_fit
        check_name(message.name)
        request = await asyncio.to_thread(self._request, message, principal)
        if not request.is_replacing:
            await asyncio.to_thread(self.store.check_new, principal, plan.model_id, request.name)
        whole = replace(plan, taps=tuple(replace(tap, reductions=(PooledNorm(),)) for tap in plan.taps))
        preview = await self.engine.checks.preview(whole)
        channels = {output.name: output.shape[-1] - 1 for output in preview.outputs}
        digest = (await self.engine.identity(self.engine.deployment(plan.model_id))).digest
        make = partial(PooledValues, self.folder, self.budget, channels, request.sample_count)
        values = await asyncio.to_thread(make)
        positions = [tap.positions.SerializeToString().hex() for tap in start.taps]
        about = {
            name: (digest, positions[index])
            for index, names in enumerate(preview.expansions)
            for name in names
        }
        key = principal, plan.model_id, request.name
        return DirectionFitting(request, values, about, partial(self.store.put, *key))

    def _request(self, message: pb.DirectionFit, principal: str) -> DirectionRequest:
        if message.dataset_id:
            with closing(self.datasets.open(principal, message.dataset_id)) as reader:
                message = with_targets(message, reader)
        return direction_request(message)


class DirectionFitting:
    """One fit; `DirectionFits.begin` makes it.

    Args:
        request: What is fitted.
        values: Gets the values.
        about: The digest of the model, and the positions in hex, of each place.
        put: Stores directions.
    """

    def __init__(
        self,
        request: DirectionRequest,
        values: PooledValues,
        about: Mapping[str, tuple[str, str]],
        put: "partial[StoredDirections]",
    ) -> None:
        self._request, self._values, self._about, self._put = request, values, about, put
        self._count = 0
        self._stopped = threading.Event()

    async def add(self, extraction: Extraction) -> None:
        """Keep the values of a batch.

        Raises:
            ServiceError: `DIRECTION_REJECTED`, there are more samples than labels, or other places than
                expected.
        """
        maps = extraction.feature_maps
        if {each.output.name for each in maps} != set(self._values.places):
            raise rejected(
                "a batch has values at other places than the model's example input; name the places"
            )
        counts = {each.output.shape[0] for each in maps}
        if len(counts) > 1:
            raise rejected(
                f"the places have {' and '.join(map(str, sorted(counts)))} rows for one batch; choose places "
                "with a row for each sample"
            )
        count = counts.pop()
        if self._count + count > self._request.sample_count:
            raise rejected(
                f"there are more samples than the {self._request.sample_count:,} labels; give one for each"
            )
        await asyncio.to_thread(self._write, extraction)
        self._count += count

    def _write(self, extraction: Extraction) -> None:
        for each in extraction.feature_maps:
            name = each.output.name
            if each.values is None or each.output.shape[-1] != self._values.width(name):
                raise rejected(f"'{name}' has other channels in a batch than in the example input")
            self._values.write(name, self._count, each.values.data)

    async def finish(self) -> list[pb.Direction]:
        """Fit and store the directions.

        Raises:
            ServiceError: `DIRECTION_REJECTED`, samples are missing or nothing can be fitted to the values;
                the errors of the store.
        """
        if self._count != self._request.sample_count:
            raise rejected(
                f"there are {self._count:,} samples and {self._request.sample_count:,} labels; give one for "
                "each sample"
            )
        try:
            stored = await asyncio.to_thread(self._fitted)
        except asyncio.CancelledError:
            self._stopped.set()
            raise
        return directions_to_wire(stored)

    def _fitted(self) -> StoredDirections:
        directions = [self._placed(place) for place in self._values.places]
        return self._put(directions, is_replacing=self._request.is_replacing)

    def _placed(self, place: str) -> Direction:
        direction = fit_place(self._request, self._values, place, self._check)
        digest, positions = self._about[place]
        return replace(direction, about=replace(direction.about, positions=positions, model_digest=digest))

    def _check(self) -> None:
        if self._stopped.is_set():
            raise ServiceError(ErrorReason.CANCELLED, "the call was cancelled")

    async def close(self) -> None:
        """Remove the values."""
        self._stopped.set()
        await asyncio.to_thread(self._values.close)


def check_start(start: stream_pb2.ExtractStreamStart) -> None:
    """Refuse what a fit does not take.

    Raises:
        ServiceError: `INVALID_ARGUMENT`.
    """
    given = [name for name in _REFUSED if getattr(start, name)]
    if start.HasField("objective"):
        given.append("objective")
    if given:
        raise invalid(given[0], "a fit of directions does not take it; leave it out")


def fit_plan(plan: Plan) -> Plan:
    """Return the plan of the batches of a fit.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, a tap has more than a selector and positions.
    """
    return replace(plan, taps=tuple(_fit_tap(f"taps[{i}]", tap) for i, tap in enumerate(plan.taps)))


def _fit_tap(field: str, tap: TapRequest) -> TapRequest:
    plain = TapRequest(tap.selector, reductions=tap.reductions, channel_dim=tap.channel_dim)
    if tap != plain or not all(isinstance(entry, Positions) for entry in tap.reductions):
        raise invalid(field, "a tap of a fit has a selector and positions alone")
    if tap.selector.is_gradient or tap.selector.parameter is not None:
        raise invalid(field, f"'{tap.selector.text}' is no value of the forward pass")
    return replace(tap, reductions=(*tap.reductions, PooledNorm()))
