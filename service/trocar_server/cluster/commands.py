"""`trocar serve --ray` and `trocar cluster`: deploy on a Ray cluster, look at it, scale it and stop it."""

import json
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Event, Thread
from typing import Annotated, Any

import typer

from trocar_server.cluster.session import AUTO, LOCAL, open_session
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError

Address = Annotated[
    str,
    typer.Option(
        "--ray", metavar="ADDRESS", help="Address of the Ray cluster, or auto for the one of this machine."
    ),
]

_LOOK_S = 1.0
"""Seconds between looks at whether another command has stopped the deployment."""
_STOP_S = 30.0
"""Seconds for the stop of Ray Serve, besides those of the replicas."""

cluster_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    add_completion=False,
    help="Look at a deployment of `trocar serve --ray`, scale it and stop it.",
)


def serve_on_ray(address: str, config: ServerConfig, on_ready: Callable[[list[str], str], None]) -> None:
    """Deploy a configuration, and return when it is ready; with `local`, when it has been stopped.

    That is by SIGTERM, SIGINT or `trocar cluster stop`.

    Args:
        address: `local`, `auto`, or the address of a cluster.
        config: What to deploy.
        on_ready: Called with the addresses of the gateways, and the one of the Ray cluster.

    Raises:
        ServiceError: There is no cluster, the configuration does not fit it, or a replica cannot start.
    """
    stopped = Event()
    with open_session(address):
        import ray

        from trocar_server.cluster import deploying

        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: stopped.set())
        try:
            deploying.deploy(config, "127.0.0.1" if address == LOCAL else "")
            addresses = deploying.wait_until_ready(config, stopped.is_set, _warn)
            if not stopped.is_set():
                on_ready(addresses, ray.get_runtime_context().gcs_address)
            if address == LOCAL:
                while not stopped.wait(_LOOK_S) and deploying.is_deployed():
                    pass
        finally:
            if address == LOCAL:
                # On a thread: if Ray has been killed, too, as by a signal to all processes, it would wait.
                stopping = Thread(target=deploying.stop, daemon=True)
                stopping.start()
                stopping.join(config.cluster.drain_s + config.grace_s + _STOP_S)


def _warn(problem: str) -> None:
    typer.echo(f"warning: {problem}", err=True)


@cluster_app.command("status")
def status(
    address: Address = AUTO,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print gateways, and replicas with the work that waits for them."""
    with _on_cluster(address):
        import ray

        from trocar_server.cluster.deploying import deployed
        from trocar_server.cluster.directory import open_directory

        deployed()
        state: Any = ray.get(open_directory().state.remote())
    if as_json:
        typer.echo(json.dumps(state))
        return
    for line in _lines(state):
        typer.echo(line)


def _lines(state: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each gateway, model and replica."""
    from trocar_server.cluster.deployments import APP_PREFIX

    for gateway in sorted(state["gateways"], key=lambda gateway: str(gateway["address"])):
        yield f"gateway {gateway['address']}  node {gateway['node_id'][:8]}"
    for model_id, least in sorted(state["wanted"].items()):
        own = [replica for replica in state["replicas"] if replica["model_id"] == model_id]
        yield f"model {model_id}  {len(own)} replicas, at least {least}"
        for replica in sorted(own, key=lambda replica: int(replica["slot"])):
            doing = "draining" if replica["is_draining"] else "serving"
            yield (
                f"  {replica['slot']}  {replica['address']}  node {replica['node_id'][:8]}  {doing}  "
                f"{replica['call_count']} calls, {replica['waiting_s']:.3g} s of work"
            )
        count, why = state["failures"].get(APP_PREFIX + model_id, (0, ""))
        if count:
            yield f"  {count} could not start, the last one: {why}"


@cluster_app.command("scale")
def scale(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The model.")],
    least: Annotated[int, typer.Argument(metavar="LEAST", help="Replicas without any load.")],
    most: Annotated[
        int | None, typer.Argument(metavar="MOST", help="The most replicas; the same number if left out.")
    ] = None,
    address: Address = AUTO,
) -> None:
    """Change the number of replicas of a model, and wait until the new ones are ready."""
    with _on_cluster(address):
        from trocar_server.cluster import deploying

        most = least if most is None else most
        deploying.scale(model, least, most)
        deploying.wait_until_ready(deploying.deployed())
    typer.echo(f"{model} has at least {least} and at most {most} replicas")


@cluster_app.command("stop")
def stop(address: Address = AUTO) -> None:
    """Drain and stop every replica and gateway; a Ray cluster that you started stays."""
    with _on_cluster(address):
        from trocar_server.cluster import deploying

        deploying.deployed()
        deploying.stop()
    typer.echo("stopped")


@contextmanager
def _on_cluster(address: str) -> Iterator[None]:
    """Connect to the cluster.

    Raises:
        ServiceError: There is none at this address.
    """
    if address == LOCAL:
        raise _nothing_local()
    with open_session(address):
        yield


def _nothing_local() -> ServiceError:
    from trocar_api.reasons import ErrorReason

    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        "a cluster of `trocar serve --ray local` ends with that command; use --ray auto while it runs",
    )
