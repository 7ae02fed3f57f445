"""Completion of model ids and module paths in the shell, asked of the server that the command line names.

It waits one second at most and offers nothing where no server answers.
"""

from collections.abc import Callable

import typer

import trocar
from trocar._cli.options.connection_options import client_of

TIMEOUT_S = 1.0
"""How long a shell waits for the names."""
_MODEL_PARAMETERS = ("model_id", "model_a", "model_ids")


def complete_models(context: typer.Context) -> list[str]:
    """Return the ids of the server's models."""
    return _asked(context, lambda client: [model.model_id for model in client.models()])


def complete_modules(context: typer.Context) -> list[str]:
    """Return the paths of the modules of the model that the command line names; none before it does."""
    given = [context.params[name] for name in _MODEL_PARAMETERS if context.params.get(name)]
    if not given:
        return []
    model_id = given[0] if isinstance(given[0], str) else given[0][0]
    return _asked(context, lambda client: [module.path for module in client.modules(model_id) if module.path])


def _asked(context: typer.Context, ask: Callable[[trocar.Client], list[str]]) -> list[str]:
    try:
        with client_of({**context.params, "timeout": TIMEOUT_S}) as client:
            return ask(client)
    except (trocar.TrocarError, OSError, ValueError, typer.BadParameter):
        return []
