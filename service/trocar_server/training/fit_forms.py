"""From plain dicts and lists to the description of a fit."""

from collections.abc import Mapping
from typing import Any

import pydantic

from trocar_api.reasons import ErrorReason
from trocar_server.training.fit_spec import FitSpec
from trocar_server.training.forms import form_problems
from trocar_server.training.problems import Problems

_WHAT = "no such fit can be run"


def parse_fit_spec(data: Mapping[str, Any]) -> FitSpec:
    """Read a description.

    Raises:
        ServiceError: `FIT_INVALID`, with every field that is missing, unknown or of the wrong form.
    """
    problems = Problems()
    try:
        return FitSpec.model_validate(data)
    except pydantic.ValidationError as error:
        form_problems(error, problems)
    raise problems.error(ErrorReason.FIT_INVALID, _WHAT)
