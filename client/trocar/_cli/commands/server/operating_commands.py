"""`trocar admin drain` and `trocar admin reload`: operation of a running server."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from trocar import Client, DrainState
from trocar._cli.failures import fail, refuse

_ASK_EVERY_S = 0.5


def drain(
    client: Client,
    undo: Annotated[bool, typer.Option("--undo", help="End the drain and accept work again.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until no call is running.")] = False,
) -> None:
    """Drain a server: refuse new work, finish calls, pause fits.

    Its health is NOT_SERVING meanwhile, so load balancers and clients with several addresses avoid it.
    Needs the scope admin.
    """
    with one_server():
        state = client.drain(undo=undo)
    while wait and state.is_draining and state.running_call_count:
        time.sleep(_ASK_EVERY_S)
        state = client._server.drain_state()  # only looks: another operator may undo the drain
    if not undo and not state.is_draining:
        fail("the drain was undone meanwhile; the server accepts work")
    typer.echo(_text(state))


def reload(client: Client) -> None:
    """Reload a server's configuration, as SIGHUP does.

    Models, data sets, limits and tokens can change; an invalid configuration changes nothing.
    Needs the scope admin.
    """
    with one_server():
        changes = client.reload_config()
    typer.echo("\n".join(changes) or "nothing has changed")


@contextmanager
def one_server() -> Iterator[None]:
    """Refuse a command line with several servers as a wrong one."""
    try:
        yield
    except ValueError as error:
        refuse(str(error))


def _text(state: DrainState) -> str:
    if not state.is_draining:
        return "the server accepts work"
    return (
        f"the server is draining: {state.running_call_count} calls run, {state.waiting_fit_count} fits wait"
    )
