"""Fit spec validation: plain dicts and lists to a `FitSpec`."""

from collections.abc import Mapping
from typing import Any

import pydantic

from trocar_api.reasons import ErrorReason
from trocar_server.training.spec.fit_spec import FitSpec
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.validation import validation_problems

_WHAT = "the fit's specification is invalid"


def parse_fit_spec(data: Mapping[str, Any]) -> FitSpec:
    """Parse a fit spec.

    Raises:
        ServiceError: `FIT_INVALID`, with every field that is missing, unknown or malformed.
    """
    problems = Problems()
    try:
        return FitSpec.model_validate(data)
    except pydantic.ValidationError as error:
        validation_problems(error, problems)
    raise problems.error(ErrorReason.FIT_INVALID, _WHAT)
