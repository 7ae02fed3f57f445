"""Deployments: the models in memory, loaded, replaced, adopted and dropped. Belongs to one event loop."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path

from trocar_api.reasons import ErrorReason
from trocar_server.caller import current_principal
from trocar_server.config import Limits
from trocar_server.engine.host.checked_plan import CheckedPlan
from trocar_server.engine.host.deployment import Deployment, is_large, make_deployment
from trocar_server.engine.host.repeatable import examine
from trocar_server.engine.request.plan import Plan
from trocar_server.engine.schedule.device import DeviceThread
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import (
    Catalogue,
    CatalogueEntry,
    HostedModel,
    ModelSpec,
    ModelState,
    guest_refused,
    load_model,
    prefetch_weights,
)

_CHECKED_KEPT = 512


class Deployments(Mapping[str, Deployment]):
    """Every loaded model by its id, those that one principal alone may use included.

    Args:
        catalogue: The models that can be loaded.
        owner: The thread that calls torch.
        limits: Returns the current limits of a call.
        data_dir: Folder of the weights.
        replica_counts: Replicas by model id; 1 where absent.
        on_drop: Called with each model of the catalogue that is served no longer; `unload` waits for what
            still runs of it.
        on_build: Called with each model of the catalogue that was loaded; `load` waits for what it starts.
    """

    def __init__(
        self,
        catalogue: Catalogue,
        owner: DeviceThread,
        limits: Callable[[], Limits],
        data_dir: Path,
        replica_counts: Mapping[str, int],
        on_drop: Callable[[Deployment], Awaitable[None]],
        on_build: Callable[[Deployment], Awaitable[None]],
    ) -> None:
        self._catalogue = catalogue
        self._owner = owner
        self._limits = limits
        self._data_dir = data_dir
        self._replica_counts = dict(replica_counts)
        self._on_drop = on_drop
        self._on_build = on_build
        self._by_id: dict[str, Deployment] = {}
        self._loading: dict[str, asyncio.Lock] = {}
        self._checked: OrderedDict[bytes, CheckedPlan] = OrderedDict()

    def __getitem__(self, model_id: str) -> Deployment:
        return self._by_id[model_id]

    def __iter__(self) -> Iterator[str]:
        return iter(tuple(self._by_id))  # other threads may look

    def __len__(self) -> int:
        return len(self._by_id)

    def find(self, model_id: str) -> Deployment:
        """Return a loaded model that the current caller may use.

        Raises:
            ServiceError: `UNKNOWN_MODEL` or `MODEL_NOT_LOADED`.
        """
        if self._catalogue.get(model_id).hosted is None:
            self._catalogue.loaded(model_id)  # raises the reason
        return self._by_id[model_id]

    def checked(self, key: bytes, plan: Plan, limits: Limits) -> CheckedPlan | None:
        """Return the checked plan of an earlier equal request, if it still holds and the caller may use it.

        Args:
            key: Of the request; see `keep_checked`.
            plan: The request, the very object that was checked.
            limits: The current limits, the very object that was checked against.
        """
        result = self._checked.get(key)
        if result is None or result.asked is not plan or result.limits is not limits:
            return None
        deployment = result.deployment
        if result.differed_count != deployment.differed_count:
            return None
        is_allowed = deployment.owner is None or deployment.owner == current_principal()
        return result if is_allowed and self._by_id.get(plan.model_id) is deployment else None

    def keep_checked(self, key: bytes, checked: CheckedPlan) -> None:
        """Keep a checked plan for equal requests, unless it is large.

        Args:
            key: The request as serialised, without its payloads.
            checked: The plan. It goes with its deployment: a model that is loaded again begins with none.
        """
        resolved, deployment = checked.resolved, checked.deployment
        if resolved is None or not checked.is_final or is_large(checked.plan, resolved):
            return
        if self._by_id.get(checked.plan.model_id) is not deployment:  # dropped meanwhile
            return
        self._checked[key] = checked
        self._checked.move_to_end(key)
        if len(self._checked) > _CHECKED_KEPT:
            self._checked.popitem(last=False)

    async def load(self, model_id: str) -> CatalogueEntry:
        """Load a model of the catalogue; does nothing when it is loaded already.

        A reload does not wait for it: what it has put in place of the model meanwhile stays.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, and any error of loading.
        """
        self._entry_to_load(model_id)  # an unknown id gets no lock
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            entry = self._entry_to_load(model_id)
            if model_id in self._by_id:
                return entry
            if not entry.is_spec_known:
                raise ServiceError(entry.error_reason or ErrorReason.MODEL_INVALID, entry.error_message)
            entry.begin()
            try:
                deployment = await self.build(entry.spec, self._replica_counts.get(model_id, 1))
                await self._begun(deployment)
            except ServiceError as error:
                entry.fail(error)
                raise
            except Exception as error:
                failed = _load_failure(model_id, error)
                entry.fail(failed)
                raise failed from error
            except BaseException:
                entry.state = ModelState.UNLOADED
                raise
            if not self._catalogue.holds(entry):
                self._dropped(deployment)
                return self._entry_to_load(model_id)
            self._by_id[model_id] = deployment
            entry.hosted, entry.state = deployment.hosted, ModelState.LOADED
            return entry

    async def _begun(self, deployment: Deployment) -> None:
        """Wait for what `on_build` starts."""
        try:
            await self._on_build(deployment)
        except BaseException:
            self._dropped(deployment)
            raise

    async def unload(self, model_id: str) -> CatalogueEntry:
        """Drop a model from memory when its calls have ended; its catalogue entry stays.

        A load that failed is no longer listed as that; if a client had asked for it, the id is free again.
        """
        self._entry_to_load(model_id)  # an unknown id gets no lock
        async with self._loading.setdefault(model_id, asyncio.Lock()):
            entry = self._entry_to_load(model_id)
            deployment = self._taken(model_id)
            if deployment is not None:
                entry.forget()
                # Calls that wait for a compiled pass run eagerly now: they need the pool.
                await asyncio.shield(self._dropped(deployment))
                await deployment.pool.drain()
            elif entry.state is ModelState.FAILED and entry.is_spec_known:
                entry.forget()
                if entry.is_requested and self._catalogue.holds(entry):
                    self._catalogue.remove(model_id)
            return entry

    async def build(self, spec: ModelSpec, replicas: int) -> Deployment:
        """Load a model beside those that are served; `replace` serves it.

        Raises:
            ServiceError: Whatever makes loading impossible.
        """
        # Downloads and imports call no torch operator and must not block the owner thread.
        await asyncio.to_thread(prefetch_weights, spec, self._data_dir)

        def make() -> Deployment:
            hosted = load_model(spec, self._owner.device, self._data_dir)
            agrees = examine(hosted)  # before any other pass, which might write to its weights
            deployment = self._make(hosted, replicas)
            hosted.pristine.is_fixed = not deployment.may_change
            may_be_cached = self._limits().feature_cache_bytes > 0 and not deployment.may_change
            deployment.is_repeatable = may_be_cached and agrees
            return deployment

        return await self._owner.run(make)

    def replace(self, deployment: Deployment, replicas: int) -> None:
        """Serve a model from `build`; calls that run on the old one of this id finish there."""
        model_id = deployment.hosted.spec.model_id
        self._drop(model_id)
        self._by_id[model_id] = deployment
        self._on_build(deployment)
        self._replica_counts[model_id] = replicas
        self._catalogue.put(deployment.hosted)

    def remove(self, model_id: str) -> None:
        """Drop a model and its catalogue entry; calls that run finish on it."""
        self._drop(model_id)
        self._catalogue.release(model_id)

    async def adopt(self, hosted: HostedModel, owner: str) -> None:
        """Serve a model that is in memory already, for one principal.

        Its weights may change between passes, on the owner thread and in place.

        Raises:
            ServiceError: `MODEL_INVALID`, it cannot run on its example input.
        """
        deployment = await self._owner.run(lambda: self._make(hosted, 1, owner))
        self._by_id[hosted.spec.model_id] = deployment
        self._catalogue.adopt(hosted, owner)

    async def release(self, model_id: str) -> None:
        """Take back `adopt`, when the calls that use it have ended."""
        self._catalogue.release(model_id)
        deployment = self._taken(model_id)
        if deployment is not None:
            await deployment.pool.drain()

    def _entry_to_load(self, model_id: str) -> CatalogueEntry:
        entry = self._catalogue.get(model_id)
        if entry.owner is not None:
            raise guest_refused(model_id)
        return entry

    def _make(self, hosted: HostedModel, replicas: int, owner: str | None = None) -> Deployment:
        """Make a deployment; one with an owner is a trainer's."""
        max_queue, is_live = self._limits().max_queue, owner is not None
        return make_deployment(hosted, replicas, max_queue, is_live=is_live, owner=owner, limits=self._limits)

    def _drop(self, model_id: str) -> None:
        deployment = self._taken(model_id)
        if deployment is not None:
            self._dropped(deployment)

    def _dropped(self, deployment: Deployment) -> Awaitable[None]:
        deployment.is_dropped = True
        return self._on_drop(deployment)

    def _taken(self, model_id: str) -> Deployment | None:
        """Take a model out, with the checked plans that keep it in memory."""
        deployment = self._by_id.pop(model_id, None)
        for key in [key for key, checked in self._checked.items() if checked.deployment is deployment]:
            del self._checked[key]
        return deployment


def _load_failure(model_id: str, error: Exception) -> ServiceError:
    """Return the error of a model whose code fails in an unforeseen way."""
    what = f"{type(error).__name__}: {first_line(error)}"
    return ServiceError(ErrorReason.MODEL_INVALID, f"model '{model_id}' cannot be loaded: {what}")
