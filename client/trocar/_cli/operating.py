"""`trocar drain` and `trocar reload`: what the operator does with a running server."""

import time
from typing import Annotated

import typer

from trocar import Client, DrainState

_ASK_EVERY_S = 0.5


def drain(
    client: Client,
    undo: Annotated[bool, typer.Option("--undo", help="Take work again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Return when no call runs any more.")] = False,
) -> None:
    """Let a server run empty: no new work, running calls finish, fits are saved and wait.

    Health says NOT_SERVING meanwhile, so that load balancers and clients with several addresses go elsewhere.
    Needs the scope admin.
    """
    state = client.drain(undo=undo)
    while wait and state.is_draining and state.running_call_count:
        time.sleep(_ASK_EVERY_S)
        state = client.drain()
    typer.echo(_text(state))


def reload(client: Client) -> None:
    """Let a server read its configuration again, as SIGHUP does. Needs the scope admin.

    Models, data sets, limits and tokens may change; what is wrong leaves everything as it was.
    """
    changes = client.reload_config()
    typer.echo("\n".join(changes) or "nothing has changed")


def _text(state: DrainState) -> str:
    if not state.is_draining:
        return "the server takes work"
    return f"the server runs empty: {state.running_call_count} calls run, {state.waiting_fit_count} fits wait"
