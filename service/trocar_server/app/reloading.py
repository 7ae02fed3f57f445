"""Configuration reload of a running server: all changes are applied, or none.

    reload = Reload(old, new, engine, datasets)
    prepared = await reload.prepare()
    changes = reload.apply(prepared)
    retried = await reload.retry_failed()

Changes that need a restart (the address, the device, TLS or not) are refused by name. New and changed models
are loaded next to the old ones, before anything is replaced.
"""

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trocar_api.reasons import ErrorReason
from trocar_server.app.access import check_address
from trocar_server.app.consistency import check_consistency
from trocar_server.app.specs import dataset_folders, model_spec
from trocar_server.config import Limits, ServerConfig
from trocar_server.engine.engine import Engine
from trocar_server.engine.host.deployment import Deployment
from trocar_server.engine.resolve.pass_memory import memory_limit
from trocar_server.errors import ServiceError
from trocar_server.models import ModelSpec, ModelState
from trocar_server.models.architectures import check_spec
from trocar_server.training.datasets import DatasetLibrary, ListedFolder

_LIVE = frozenset(("models", "datasets", "limits", "tokens"))
"""Settings that may change."""
_LIVE_LIMITS = frozenset(
    (
        *("max_request_bytes", "max_reply_bytes", "max_pass_bytes", "max_batch", "max_taps", "max_edits"),
        *("max_image_pixels", "max_dataset_bytes", "max_trainers", "trainer_ttl_s", "max_pass_s"),
    )
)
"""Limits that are read on each call."""
_BUDGETS = ("max_pending_bytes", "max_principal_bytes")
"""Limits that stay as admission has computed them at the start."""


@dataclass(frozen=True)
class PreparedReload:
    """What a reload has loaded, next to what is served."""

    folders: Mapping[str, ListedFolder]
    """The operator's data sets."""
    deployments: Mapping[str, Deployment]
    """New and changed models."""


@dataclass(frozen=True)
class Reload:
    """Transition from the active configuration to a new one.

    Attributes:
        old: The active configuration.
        new: The configuration to apply.
        engine: Has the models and the limits.
        datasets: Has the operator's data sets.
    """

    old: ServerConfig
    new: ServerConfig
    engine: Engine
    datasets: DatasetLibrary

    async def prepare(self) -> PreparedReload:
        """Check and load everything; nothing changes yet.

        Raises:
            ServiceError: `INVALID_ARGUMENT` for what needs a restart, `MODEL_CONFLICT` for an id in use, and
                the errors of loading a model.
        """
        check_address(self.new)
        check_consistency(self.new)
        self._check_live()
        folders = await asyncio.to_thread(dataset_folders, self.new)  # a network file system may be slow
        specs = {model_id: await self._spec(model_id) for model_id in self._models_to_load()}
        deployments = {model_id: await self._build(spec) for model_id, spec in specs.items()}
        for model_id in specs:
            self._check_free(model_id)
        return PreparedReload(folders, deployments)

    def apply(self, prepared: PreparedReload) -> list[str]:
        """Apply the configuration; returns the changes, one line each.

        It neither fails nor awaits: called right after `prepare`, no call sees a partial change, and a
        caller that goes away leaves none behind.
        """
        for model_id in self._removed():
            self.engine.deployments.remove(model_id)
        for model_id, deployment in prepared.deployments.items():
            self.engine.deployments.replace(deployment, self.new.models[model_id].replicas)
        self.datasets.replace_listed(prepared.folders)
        self._set_limits()
        return list(self._changes())

    async def retry_failed(self) -> list[str]:
        """Retry models that failed to load before and whose configuration is unchanged; may take minutes.

        A model whose retry is cancelled stays failed, so that the next reload retries it.
        """
        lines = []
        for model_id in self.new.models:
            entry = self.engine.catalogue.get(model_id)
            if entry.hosted is not None or not entry.error_message:
                continue
            before = ServiceError(entry.error_reason or ErrorReason.MODEL_INVALID, entry.error_message)
            try:
                await self._retry(model_id)
            except ServiceError as error:
                self.engine.catalogue.add_failed(model_id, error)
                lines.append(f"model {model_id}: still failed: {error.message}")
            except asyncio.CancelledError:
                self._fail_again(model_id, before)
                raise
            else:
                lines.append(f"model {model_id}: loaded")
        return lines

    async def _retry(self, model_id: str) -> None:
        if not self.engine.catalogue.get(model_id).is_spec_known:
            spec = await self._checked_spec(model_id)
            self.engine.catalogue.release(model_id)
            self.engine.catalogue.add(spec)
        await self.engine.deployments.load(model_id)

    def _fail_again(self, model_id: str, error: ServiceError) -> None:
        """Mark a model as failed as before, unless somebody else loads or has loaded it."""
        if self.engine.catalogue.has(model_id):
            entry = self.engine.catalogue.get(model_id)
            if entry.state is ModelState.UNLOADED:
                entry.fail(error)

    def _check_live(self) -> None:
        settings = type(self.new).model_fields
        stuck = [key for key in settings if key not in _LIVE and self._differs(key)]
        stuck += [f"limits.{key}" for key in self._changed_limits() if key not in _LIVE_LIMITS]
        if stuck:
            raise ServiceError(
                ErrorReason.INVALID_ARGUMENT,
                f"{', '.join(stuck)} can only be changed by a restart; restore the old value, or restart the "
                "server",
            )

    async def _spec(self, model_id: str) -> ModelSpec:
        spec = await self._checked_spec(model_id)
        self._check_free(model_id)
        return spec

    def _check_free(self, model_id: str) -> None:
        """Refuse the id of a new model that a client has taken, perhaps since the reload began."""
        if model_id not in self.old.models and self.engine.catalogue.has(model_id):
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT,
                f"a client has loaded or published a model '{model_id}'; unload it first, or choose another "
                "id",
            )

    async def _checked_spec(self, model_id: str) -> ModelSpec:
        spec = model_spec(model_id, self.new.models[model_id])
        await asyncio.to_thread(check_spec, spec)  # may import a library
        return spec

    async def _build(self, spec: ModelSpec) -> Deployment:
        return await self.engine.deployments.build(spec, self.new.models[spec.model_id].replicas)

    def _set_limits(self) -> None:
        limits = self.new.limits
        in_force = self.engine.admission.limits.model_dump(include=set(_BUDGETS))
        most = memory_limit(limits.max_pass_bytes, self.engine.owner.device)
        self.engine.limits = limits.model_copy(update={**in_force, "max_pass_bytes": most})
        self.datasets.set_limits(limits.max_dataset_bytes, limits.max_image_pixels)

    def _differs(self, key: str) -> bool:
        return bool(getattr(self.old, key) != getattr(self.new, key))

    def _changed_limits(self) -> list[str]:
        old, new = self.old.limits, self.new.limits
        return [key for key in Limits.model_fields if getattr(old, key) != getattr(new, key)]

    def _models_to_load(self) -> list[str]:
        old = self.old.models
        return [model_id for model_id, model in self.new.models.items() if old.get(model_id) != model]

    def _removed(self) -> list[str]:
        return [model_id for model_id in self.old.models if model_id not in self.new.models]

    def _changes(self) -> Iterator[str]:
        for model_id in self._removed():
            yield f"model {model_id}: removed"
        for model_id in self._models_to_load():
            yield f"model {model_id}: {'changed' if model_id in self.old.models else 'added'}"
        for name in sorted({*self.old.datasets, *self.new.datasets}):
            if self.old.datasets.get(name) != self.new.datasets.get(name):
                is_new, is_gone = name not in self.old.datasets, name not in self.new.datasets
                yield f"data set {name}: {'added' if is_new else 'removed' if is_gone else 'changed'}"
        for key in self._changed_limits():
            yield f"limits.{key}: {getattr(self.old.limits, key)} -> {getattr(self.new.limits, key)}"
        if self._differs("tokens"):
            yield f"tokens: {'required' if self.new.tokens else 'no longer required'}"
