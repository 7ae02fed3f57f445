"""Pass errors: what torch, a model or a guard raises in a pass, in the words of the service."""

from collections.abc import Iterator
from contextlib import contextmanager

from trocar_api.reasons import ErrorReason
from trocar_server.engine.execute.collecting import EditMissedError, NoGradientError
from trocar_server.engine.host.deployment import input_rejected
from trocar_server.engine.schedule.device_memory import is_out_of_memory
from trocar_server.errors import ServiceError, first_line
from trocar_server.models import HostedModel
from trocar_server.surgery import CallsDifferError, PassAborted, ValueMissingError, independent


@contextmanager
def domain_errors(
    hosted: HostedModel, needed_bytes: int = 0, *, passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Convert errors of torch, a model or a guard inside the context to domain errors.

    Args:
        hosted: The model.
        needed_bytes: Estimated memory of the pass, for the out-of-memory message; 0 if unknown.
        passes: Exceptions that are not converted.

    Raises:
        ServiceError: `DEADLINE_EXCEEDED`, `CANCELLED`, `OUT_OF_MEMORY` or `INPUT_REJECTED`.
    """
    problem: ServiceError
    try:
        yield
        return
    except ServiceError:
        raise
    except PassAborted as stop:
        problem = _aborted(stop.reason)
    except ValueMissingError as missing:
        problem = ServiceError(
            ErrorReason.UNKNOWN_PICK,
            f"'{missing.args[0]}' was not computed for these inputs: which modules run depends on the data",
        )
    except EditMissedError as missed:
        problem = _edit_missed(missed.args[0])
    except NoGradientError as missing:
        problem = independent(missing.args[0])
    except Exception as error:
        if isinstance(error, (CallsDifferError, *passes)):
            raise
        is_memory = is_out_of_memory(error)
        problem = _out_of_memory(error, needed_bytes) if is_memory else input_rejected(hosted, error)
    # Raised here, and not above, where it would keep the frames of the failed pass, and so its values, alive.
    raise problem


def _edit_missed(name: str) -> ServiceError:
    return ServiceError(
        ErrorReason.MODULE_NOT_CALLED,
        f"'{name}' was not called in this pass, so it was not edited: which modules run depends on the data",
        name=name,
    )


def _aborted(reason: ErrorReason) -> ServiceError:
    what = "the deadline passed" if reason is ErrorReason.DEADLINE_EXCEEDED else "the call was cancelled"
    return ServiceError(reason, f"{what}; the pass was stopped")


def _out_of_memory(error: BaseException, needed_bytes: int) -> ServiceError:
    needed = f"; the pass needs about {needed_bytes:,} bytes" if needed_bytes else ""
    facts = {"needed_bytes": str(needed_bytes)} if needed_bytes else {}
    return ServiceError(
        ErrorReason.OUT_OF_MEMORY,
        f"the device has too little memory: {first_line(error)}{needed}; use a smaller batch, or ask for "
        "fewer or earlier taps",
        **facts,
    )
