"""One trainer as callers see it: its calls in order, its life, its fit. Belongs to one event loop.

The work itself is `core`'s, on the thread that owns torch.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum, unique
from typing import TypeVar

from trocar_api.reasons import ErrorReason
from trocar_server.engine.engine import Engine
from trocar_server.engine.passes import domain_errors
from trocar_server.errors import ServiceError
from trocar_server.surgery import PassGuard
from trocar_server.training.batch import Batch
from trocar_server.training.core import TrainerCore
from trocar_server.training.numbering import Numbering
from trocar_server.training.spec import TrainerSpec
from trocar_server.training.step_result import EvalResult, StepResult

Result = TypeVar("Result")

MakeBatch = Callable[[PassGuard], Batch]
"""Makes a batch on the thread that owns torch."""


@unique
class TrainerState(StrEnum):
    """What a trainer does."""

    READY = "ready"
    FITTING = "fitting"
    PAUSED = "paused"
    BROKEN = "broken"


@unique
class Kind(StrEnum):
    """Numbered calls."""

    STEP = "a step"
    FORWARD_BACKWARD = "a forward and backward pass"
    OPTIMIZER_STEP = "an optimizer step"


@dataclass(eq=False)
class Trainer:
    """A trainer.

    Attributes:
        trainer_id: 32 hexadecimal digits.
        principal: Whose it is.
        spec: As it was made.
        core: What computes. Its tensors belong to the owner thread.
        created_at_s: In seconds since 1970.
        ttl_s: Seconds after its last use at which it is closed.
        request_id: Of the call that made it.
    """

    trainer_id: str
    principal: str
    spec: TrainerSpec
    core: TrainerCore
    engine: Engine
    created_at_s: float
    ttl_s: float
    request_id: str = ""
    numbering: Numbering[StepResult] = field(default_factory=Numbering)
    used_at_s: float = field(default_factory=time.time)
    checkpoint_number: int | None = None
    fitting: TrainerState | None = None
    """`FITTING` or `PAUSED` while there is a fit."""
    is_closed: bool = False

    @property
    def state(self) -> TrainerState:
        """What it does now."""
        if self.core.is_broken:
            return TrainerState.BROKEN
        return self.fitting or TrainerState.READY

    @property
    def expires_at_s(self) -> float:
        """When it is closed unless it is used."""
        return self.used_at_s + self.ttl_s

    def use(self) -> None:
        """Renew its time to live."""
        self.used_at_s = time.time()

    def check_free(self) -> None:
        """Refuse to change the weights while a fit does.

        Raises:
            ServiceError: `TRAINER_BUSY`, or `UNKNOWN_TRAINER` when it was closed meanwhile.
        """
        if self.is_closed:
            raise ServiceError(ErrorReason.UNKNOWN_TRAINER, "the trainer was closed")
        if self.fitting is not None:
            raise ServiceError(
                ErrorReason.TRAINER_BUSY, "a fit of the trainer is not at its end; wait for it, or cancel it"
            )

    async def forward_backward(
        self, number: int | None, make_batch: MakeBatch, deadline: float | None, *, is_step: bool
    ) -> tuple[int, StepResult]:
        """Run a batch forwards and backwards, and with `is_step` update when enough were accumulated.

        Returns:
            The call's number and its result.
        """

        def work(guard: PassGuard) -> StepResult:
            batch = make_batch(guard)
            return self.core.step(batch, guard) if is_step else self.core.forward_backward(batch, guard)

        return await self._numbered(number, Kind.STEP if is_step else Kind.FORWARD_BACKWARD, work, deadline)

    async def optimizer_step(self, number: int | None, deadline: float | None) -> tuple[int, StepResult]:
        """Update the weights with the gradients that are there."""
        return await self._numbered(
            number, Kind.OPTIMIZER_STEP, lambda _: self.core.optimizer_step(), deadline
        )

    async def evaluate(self, make_batch: MakeBatch, deadline: float | None) -> EvalResult:
        """Return the loss of a batch in eval mode; nothing changes."""
        self.use()
        return await self._on_owner(lambda guard: self.core.evaluate(make_batch(guard), guard), deadline)

    async def _numbered(
        self,
        number: int | None,
        kind: Kind,
        work: Callable[[PassGuard], StepResult],
        deadline: float | None,
    ) -> tuple[int, StepResult]:
        self.use()
        async with self.numbering.turn(number, kind) as turn:
            if turn.result is None:
                self.check_free()
                turn.finish(await self._on_owner(work, deadline))
        assert turn.result is not None  # it was known, or is finished
        return turn.number, turn.result

    async def _on_owner(self, work: Callable[[PassGuard], Result], deadline: float | None) -> Result:
        guard = PassGuard(deadline)

        def run() -> Result:
            with domain_errors(self.core.hosted):
                return work(guard)

        return await self.engine.run(run, guard, deadline)
