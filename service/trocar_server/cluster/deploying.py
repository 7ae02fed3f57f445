"""Deployment of a configuration on a Ray cluster: checked, started, awaited, changed and stopped.

deploy(config)
wait_until_ready(config)
"""

import logging
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.schema import ApplicationStatus, ServeStatus

from trocar_api.reasons import ErrorReason
from trocar_server.app.access import check_address
from trocar_server.app.server_id import server_id
from trocar_server.cluster.cluster_key import make_cluster_key
from trocar_server.cluster.deployments import (
    APP_PREFIX,
    CONTROLLER_OPTIONS,
    GATEWAY_APP,
    gateway_target,
    model_target,
)
from trocar_server.cluster.directory import open_directory, start_directory
from trocar_server.config import ClusterConfig, PlacementConfig, ServerConfig, resolve_files
from trocar_server.errors import ServiceError, unknown
from trocar_server.storage.disk_errors import disk_errors
from trocar_server.storage.durable import make_folder

_POLL_S = 0.2
_LAST_PROCESS_S = 15.0
"""Seconds for the last processes of a cluster that was killed, which have its folders until they end."""
_FAILED_STARTS = 2
"""After so many an application of which nothing has started is said to be unable to; Ray tries on."""
_OWN_ERRORS = ("ChildFailedError: ", "trocar_server.errors.ServiceError: ")
"""Of a child process, and of its supervisor."""
_DIED = "health check failed"
"""What Ray Serve (2.60) says of a replica that served and died; its application then stays failed."""
logging.getLogger("ray.serve").setLevel(logging.WARNING)  # or it tells of HTTP options, which nobody set


def _run(targets: Sequence[Any]) -> None:
    """Hand applications to Ray Serve, without waiting until they run."""
    serve.run_many(targets, wait_for_ingress_deployment_creation=False, wait_for_applications_running=False)


def placements(config: ServerConfig) -> dict[str, PlacementConfig]:
    """Return the placement of every model.

    Raises:
        ServiceError: `INVALID_ARGUMENT`: a placement is for a model that is not configured.
    """
    named = config.cluster.models
    if others := sorted(named.keys() - config.models.keys()):
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            f"[cluster.models] names {', '.join(others)}, and [models] does not",
        )
    return {model_id: named.get(model_id, PlacementConfig()) for model_id in config.models}


def check(config: ServerConfig) -> None:
    """Refuse a configuration that can run on no cluster.

    Raises:
        ServiceError: `INVALID_ARGUMENT`: no model, an address without protection, or a placement of another
            model.
    """
    if not config.models:
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "a cluster needs at least one model")
    if config.host.startswith("unix:"):
        raise ServiceError(ErrorReason.INVALID_ARGUMENT, "a cluster cannot listen on a Unix socket")
    check_address(config)
    placements(config)


def _check_resources(model_id: str, placement: PlacementConfig) -> None:
    needed = {"CPU": placement.cpus, "GPU": placement.gpus, **placement.resources}
    needed = {name: count for name, count in needed.items() if count}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(name, 0) >= count for name, count in needed.items()) for node in nodes):
        return
    largest: dict[str, float] = {
        name: max((node.get(name, 0) for node in nodes), default=0) for name in needed
    }
    raise ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"no node can run a replica of '{model_id}': it needs {_text(needed)} on one node, and the most that "
        f"any node has is {_text(largest)}; change [cluster.models.{model_id}]",
    )


def _text(resources: dict[str, float]) -> str:
    return ", ".join(f"{count:g} {name}" for name, count in resources.items()) or "nothing"


def deploy(config: ServerConfig, host: str = "") -> None:
    """Deploy every model and the gateways; models of an earlier configuration are removed.

    Args:
        config: What to deploy.
        host: Where replicas listen; on the addresses of their nodes when empty.

    Raises:
        ServiceError: As `check`; `INVALID_ARGUMENT`, a model needs resources that no node has;
            `STORAGE_UNAVAILABLE`, the data directory cannot be written, or another cluster uses it.
    """
    config = with_absolute_paths(config)
    check(config)
    for model_id, placement in placements(config).items():
        _check_resources(model_id, placement)
    prepare(config, host)
    serve.start(
        proxy_location="Disabled",
        logging_config={"log_level": "WARNING"},
        controller_options=CONTROLLER_OPTIONS,
    )
    for name in serve.status().applications:
        if name.startswith(APP_PREFIX) and name.removeprefix(APP_PREFIX) not in config.models:
            serve.delete(name, _blocking=False)
    targets = [model_target(model_id, config, place, host) for model_id, place in placements(config).items()]
    _run([*targets, gateway_target(config)])


def with_absolute_paths(config: ServerConfig) -> ServerConfig:
    """Resolve relative paths and default folders, once: replicas run elsewhere, and so does `scale`.

    Paths of a configuration file are absolute already; the others are relative to where the command runs.
    """
    values = config.model_dump(mode="json", exclude_unset=True)
    resolve_files(values, Path.cwd())
    if not config.has_own_data_dir:  # the default depends on who asks, and `scale` may be someone else
        values |= {"data_dir": str(config.data_dir), "cache_dir": str(config.weights_dir)}
    folders = ((values, "data_dir"), (values, "cache_dir"), (values.get("cluster", {}), "trainers_dir"))
    for table, name in folders:
        if table.get(name):
            table[name] = str(Path(table[name]).expanduser().absolute())
    return ServerConfig(**values)


def prepare(config: ServerConfig, host: str = "") -> None:
    """Make what replicas and gateways find when they start: key, directory, and leases of the folders.

    Args:
        config: What is deployed.
        host: See `deploy`.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, a folder cannot be written, or another cluster uses it; the
            message names it.
    """
    data_dir, trainers_dir = config.cluster_folders
    with disk_errors("data directory of the cluster"):
        _check_writable("data_dir", data_dir)
        if config.cluster.trainers_dir is not None:
            _check_writable("cluster.trainers_dir", trainers_dir)
        server_id(data_dir)
        make_cluster_key(data_dir)
        is_first = not is_deployed()
        directory = start_directory(data_dir)
        try:
            _claim(directory, [str(data_dir), str(trainers_dir)])
        except ServiceError:
            if is_first:
                ray.kill(directory)
            raise
        ray.get(directory.deploy.remote(_spec(config, host)))


def _claim(directory: Any, folders: list[str]) -> None:
    """Take the folders' leases for this cluster.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`, another cluster has one of them, and keeps it.
    """
    give_up = time.monotonic() + _LAST_PROCESS_S
    while problem := str(ray.get(directory.claim.remote(folders))):
        if time.monotonic() > give_up:
            raise ServiceError(ErrorReason.STORAGE_UNAVAILABLE, problem)
        time.sleep(_POLL_S)


def _check_writable(setting: str, folder: Path) -> None:
    """Refuse a folder that cannot be made or written: an operator's error, so the message names it.

    Raises:
        ServiceError: `STORAGE_UNAVAILABLE`.
    """
    try:
        make_folder(folder)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ServiceError(
            ErrorReason.STORAGE_UNAVAILABLE,
            f"{setting} '{folder}' cannot be written: {error.strerror}; it must be on storage that "
            "every node shares",
        ) from None


def scale(model_id: str, least: int, most: int) -> None:
    """Change the number of replicas of a deployed model; running replicas are not replaced.

    Raises:
        ServiceError: `UNKNOWN_MODEL`, or `INVALID_ARGUMENT`.
    """
    config = deployed()
    spec: Any = ray.get(open_directory().spec.remote())
    host = spec["host"]
    known = placements(config)
    if model_id not in known:
        raise unknown(ErrorReason.UNKNOWN_MODEL, "model", model_id, known, f"deployed: {', '.join(known)}")
    if not 1 <= least <= most:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"{least} to {most} replicas: at least 1, and the first the smaller"
        )
    changed = known[model_id].model_copy(update={"min_replicas": least, "max_replicas": most})
    cluster = config.cluster.model_copy(update={"models": {**known, model_id: changed}})
    config = config.model_copy(update={"cluster": ClusterConfig(**cluster.model_dump())})
    ray.get(open_directory().deploy.remote(_spec(config, host)))
    _run([model_target(model_id, config, changed, host)])


def _spec(config: ServerConfig, host: str) -> dict[str, Any]:
    """Return what the directory keeps of a deployment."""
    result = {model_id: place.model_dump(mode="json") for model_id, place in placements(config).items()}
    return {
        "config": config.model_dump(mode="json", exclude_unset=True),
        "placements": result,
        "host": host,
    }


def is_deployed() -> bool:
    """Whether there is a deployment, or one that is being stopped."""
    try:
        open_directory()
    except ValueError:
        return False
    return True


def deployed() -> ServerConfig:
    """Return the configuration that is deployed.

    Raises:
        ServiceError: `INVALID_ARGUMENT`: none is.
    """
    try:
        spec: Any = ray.get(open_directory().spec.remote())
    except ValueError:
        spec = {}
    if not spec:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT,
            "Trocar is not deployed on this cluster; `trocar serve --ray ADDRESS --config FILE` does it",
        )
    # Variables of whoever deployed it are among its settings; those of whoever asks are not to be.
    settings = {**spec["config"], "_env_prefix": "TROCAR_OF_NOBODY_"}
    return ServerConfig(**settings)


def stop() -> None:
    """Drain and stop every replica and gateway, and Ray Serve itself if it has nothing else to do.

    Does nothing where all of it has stopped already, as by `trocar cluster stop` in another process.
    """
    with suppress(RayActorError):  # of Ray Serve's controller, which this process has used
        _stop_applications()
    with suppress(ValueError):
        ray.kill(open_directory())


def _stop_applications() -> None:
    names = list(serve.status().applications)
    if all(_is_own(name) for name in names):
        serve.shutdown()
        return
    for name in filter(_is_own, names):
        serve.delete(name)


def _is_own(name: str) -> bool:
    return name == GATEWAY_APP or name.startswith(APP_PREFIX)


def _not_ready(why: str) -> None:
    raise ServiceError(ErrorReason.MODEL_NOT_LOADED, why)


def wait_until_ready(
    config: ServerConfig,
    is_stopped: Callable[[], bool] = lambda: False,
    on_refused: Callable[[str], None] = _not_ready,
) -> list[str]:
    """Wait until every model has its least number of replicas, and every node a gateway.

    Args:
        config: What was deployed.
        is_stopped: Whether to give up.
        on_refused: Called with the reason for each model of which some replicas serve and others were
            refused, as they differ: it counts as ready. By default
            an error.

    Returns:
        The addresses of the gateways.

    Raises:
        ServiceError: A replica or a gateway could not be started, or not in time.
    """
    until = time.monotonic() + config.cluster.start_timeout_s
    problem = "nothing is ready"
    while not is_stopped():
        state: Any = ray.get(open_directory().state.remote())
        status = serve.status()
        _check_failures(state, status)
        refused = _refused(state)
        problem = _missing(config, state, refused) or _unsettled(status, refused)
        if not problem:
            for why in refused.values():
                on_refused(why)
            return sorted(gateway["address"] for gateway in state["gateways"])
        if time.monotonic() > until:
            raise ServiceError(
                ErrorReason.MODEL_NOT_LOADED,
                f"not ready after {config.cluster.start_timeout_s:g} s: {problem}; see "
                "`trocar cluster status` and the logs of Ray",
            )
        time.sleep(_POLL_S)
    return []


def _refused(state: dict[str, Any]) -> dict[str, str]:
    """Return, by model that some replicas serve, why others were refused."""
    serving = {report["model_id"] for report in state["replicas"] if not report["is_draining"]}
    return {model_id: why for model_id, why in state["refused"].items() if model_id in serving}


def _missing(config: ServerConfig, state: dict[str, Any], refused: Collection[str]) -> str:
    """Describe what is not ready; empty if everything is, but for replicas of models in `refused`."""
    serving = [report["model_id"] for report in state["replicas"] if not report["is_draining"]]
    for model_id, placement in placements(config).items():
        count = serving.count(model_id)
        if count < placement.min_replicas and model_id not in refused:
            _, why = state["failures"].get(APP_PREFIX + model_id, (0, ""))
            told = f", and the last one to fail said: {why}" if why else ""
            return f"{count} of {placement.min_replicas} replicas of '{model_id}' are ready{told}"
    nodes = sum(node["Alive"] for node in ray.nodes())
    if len(state["gateways"]) < nodes:
        return f"{len(state['gateways'])} of {nodes} gateways are ready"
    return ""


def _unsettled(status: ServeStatus, refused: Collection[str]) -> str:
    """Describe what Ray Serve still changes, as replicas of an earlier configuration; empty if nothing.

    Of models in `refused` it tries without an end to start other replicas.
    """
    for name, app in status.applications.items():
        if name.removeprefix(APP_PREFIX) in refused:
            continue
        if _is_own(name) and app.status is not ApplicationStatus.RUNNING:
            return f"'{name}' is {app.status.value.lower()}"
    return ""


def _check_failures(state: dict[str, Any], status: ServeStatus) -> None:
    """Raise what keeps all of a deployment from starting."""
    started = {APP_PREFIX + report["model_id"] for report in state["replicas"]}
    if state["gateways"]:
        started.add(GATEWAY_APP)
    for name, (count, why) in state["failures"].items():
        if count >= _FAILED_STARTS and name not in started:
            raise _cannot_start(name, why)
    for name, app in status.applications.items():
        if not _is_own(name) or app.status is not ApplicationStatus.DEPLOY_FAILED:
            continue
        messages = [deployment.message for deployment in app.deployments.values() if deployment.message]
        if any(_DIED in message for message in messages):  # it did start; Ray Serve replaces it
            continue
        raise _cannot_start(name, cause_of(" ".join(messages) or app.message))


def _cannot_start(app: str, why: str) -> ServiceError:
    what = "the gateway" if app == GATEWAY_APP else f"a replica of '{app.removeprefix(APP_PREFIX)}'"
    return ServiceError(ErrorReason.MODEL_NOT_LOADED, f"{what} cannot start: {why}")


def cause_of(message: str) -> str:
    """Return our own words from a message of Ray Serve, which ends with a traceback."""
    for marker in _OWN_ERRORS:
        if marker in message:
            return message.rpartition(marker)[2].strip().splitlines()[0]
    return message.strip().splitlines()[-1] if message.strip() else "see the logs of Ray"
