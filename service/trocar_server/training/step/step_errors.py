"""Step errors as domain errors."""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.engine.run.forward_pass import domain_errors
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.spool import SpoolError, SpoolFullError
from trocar_server.training.step.in_backward import NonFiniteError


@contextmanager
def step_errors(hosted: HostedModel) -> Iterator[None]:
    """Convert errors of torch, the model, a guard or the spool to domain errors; see `domain_errors`.

    Raises:
        ServiceError: `STORAGE_FULL` or `SPOOL_FAILED`, and what `domain_errors` raises.
        NonFiniteError: Passed through unchanged.
    """
    what = ""
    with domain_errors(hosted):
        problem: ServiceError | None = None
        try:
            yield
            return
        except NonFiniteError as error:
            what = str(error)
        except SpoolError as error:
            problem = _spool_failed(error)
        if problem is not None:  # raised here, without the frames of the failed pass
            raise problem
    raise NonFiniteError(what)


def not_finite(what: str) -> ServiceError:
    """Return the error for a loss or gradient that is not finite."""
    return ServiceError(
        ErrorReason.NON_FINITE_STEP,
        f"{what} is not finite; the trainer is as before this step: use a smaller learning rate, "
        "`clip_norm` or a gradient rule, or `on_nonfinite` 'skip'",
    )


def broken(why: str) -> ServiceError:
    """Return the error for a trainer whose weights are half updated, or that is closed."""
    return ServiceError(
        ErrorReason.TRAINER_BROKEN, f"the trainer is broken: {why}; restore it from a checkpoint"
    )


def _spool_failed(error: SpoolError) -> ServiceError:
    is_full = isinstance(error, SpoolFullError)
    return ServiceError(
        ErrorReason.STORAGE_FULL if is_full else ErrorReason.SPOOL_FAILED,
        f"saved tensors: {first_line(error)}; the trainer is as before this step, "
        + ("free space or use a larger budget" if is_full else "the step can be retried"),
    )
