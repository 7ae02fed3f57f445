"""All trainers of a server: made, found by their owner, closed when nobody uses them. One event loop's.

Every look-up is by principal: what is absent and what is somebody else's read the same.
"""

import asyncio
import secrets
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import structlog

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.errors import ServiceError
from trocar_server.models import HostedModel
from trocar_server.training.checking import check_spec
from trocar_server.training.core import TrainerCore
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.trainer import Trainer

_ID_BYTES = 16
_log = structlog.get_logger("trocar")


class Trainers:
    """The trainers of a server.

    Args:
        engine: Has the models that trainers begin with, and serves the trainers' own.
        scratch_dir: Where the spool may write.
    """

    def __init__(self, engine: Engine, scratch_dir: Path) -> None:
        self.engine = engine
        self._scratch_dir = scratch_dir
        self._trainers: dict[str, Trainer] = {}
        self._creating = asyncio.Lock()

    def get(self, principal: str, trainer_id: str) -> Trainer:
        """Return one of a principal's trainers, and renew its time to live.

        Raises:
            ServiceError: `UNKNOWN_TRAINER`.
        """
        found = self._trainers.get(trainer_id)
        if found is None or found.principal != principal:
            raise ServiceError(
                ErrorReason.UNKNOWN_TRAINER, f"no trainer '{trainer_id[:80]}'; it may have been closed"
            )
        found.use()
        return found

    def of(self, principal: str) -> list[Trainer]:
        """Return a principal's trainers, oldest first."""
        own = [trainer for trainer in self._trainers.values() if trainer.principal == principal]
        return sorted(own, key=lambda trainer: trainer.created_at_s)

    async def create(self, principal: str, spec: TrainerSpec, request_id: str = "") -> Trainer:
        """Make a trainer; a request that was answered before returns the same one.

        Raises:
            ServiceError: `TRAINER_INVALID` with every problem of the spec, `UNKNOWN_MODEL`,
                `MODEL_NOT_LOADED`, `QUOTA_EXCEEDED`.
        """
        async with self._creating:
            for trainer in self.of(principal):
                if request_id and trainer.request_id == request_id:
                    return trainer
            self._check_room(principal)
            base, teachers = self._base(spec), self._teachers(spec)
            recording = await self.engine.recording(spec.model_id)

            def make() -> TrainerCore:
                check_spec(spec, base, recording, teachers)
                return TrainerCore(base, spec, teachers, self._scratch_dir)

            core = await self.engine.owner.run(make)
            trainer = Trainer(
                trainer_id=secrets.token_hex(_ID_BYTES),
                principal=principal,
                spec=spec,
                core=core,
                engine=self.engine,
                created_at_s=time.time(),
                ttl_s=min(spec.ttl_s or self.engine.limits.trainer_ttl_s, self.engine.limits.trainer_ttl_s),
                request_id=request_id,
            )
            await self._adopt(trainer)
            return trainer

    async def close(self, trainer: Trainer) -> None:
        """Close a trainer: what it does ends, and its memory is free."""
        trainer.is_closed = True
        self._trainers.pop(trainer.trainer_id, None)
        await self.engine.release(trainer.trainer_id)
        await self.engine.owner.run(trainer.core.close)

    async def close_expired(self) -> None:
        """Close every trainer that nobody has used for as long as it may live."""
        now = time.time()
        for trainer in list(self._trainers.values()):
            if trainer.expires_at_s < now and trainer.fitting is None:
                _log.info("trainer expired", trainer_id=trainer.trainer_id)
                await self.close(trainer)

    async def _adopt(self, trainer: Trainer) -> None:
        hosted = trainer.core.hosted
        own = replace(hosted, spec=replace(hosted.spec, model_id=trainer.trainer_id))
        await self.engine.adopt(own, trainer.principal)
        self._trainers[trainer.trainer_id] = trainer

    def _base(self, spec: TrainerSpec) -> HostedModel:
        hosted = self.engine.catalogue.loaded(spec.model_id)
        if self.engine.catalogue.get(spec.model_id).owner is not None:
            raise ServiceError(
                ErrorReason.TRAINER_INVALID,
                "model_id: a trainer begins with a model of the catalogue; publish the other trainer first",
            )
        return hosted

    def _teachers(self, spec: TrainerSpec) -> dict[str, HostedModel]:
        names = {term.teacher.model_id for term in spec.losses if term.teacher is not None}
        return {name: self.engine.catalogue.loaded(name) for name in sorted(names)}

    def _check_room(self, principal: str) -> None:
        most = self.engine.limits.max_trainers
        if len(self.of(principal)) >= most:
            raise ServiceError(
                ErrorReason.QUOTA_EXCEEDED, f"you have {most} trainers, the most there can be; close one"
            )

    def all(self) -> Sequence[Trainer]:
        """Return every trainer."""
        return list(self._trainers.values())
