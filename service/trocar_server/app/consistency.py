"""Consistency of a configuration: settings that are valid alone and contradict each other."""

from itertools import combinations

from trocar_api.reasons import ErrorReason
from trocar_server.config import ServerConfig
from trocar_server.errors import ServiceError, nearest
from trocar_server.rpc.listen.unix_socket import socket_path

_ANY = ("0.0.0.0", "::", "[::]", "")
"""Hosts that stand for every address of this machine."""


def check_consistency(config: ServerConfig) -> None:
    """Refuse two listeners on one port, and placements of models that are not configured.

    Raises:
        ServiceError: `INVALID_ARGUMENT`, with the settings to change.
    """
    problems = [*_shared_ports(config), *_strange_placements(config)]
    if problems:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"the configuration is invalid: {'; '.join(problems)}"
        )


def _shared_ports(config: ServerConfig) -> list[str]:
    pairs = combinations(_listeners(config).items(), 2)
    return [
        f"{one} and {other} are both {port}; choose another for one of them"
        for (one, (host, port)), (other, (other_host, other_port)) in pairs
        if port == other_port and (host == other_host or host in _ANY or other_host in _ANY)
    ]


def _listeners(config: ServerConfig) -> dict[str, tuple[str, int]]:
    """Return host and port of everything that listens, by setting; without free ports."""
    host = "127.0.0.1" if config.host == "localhost" else config.host
    result = {} if socket_path(config.host) else {"port": (host, config.port)}
    if config.health_port is not None:
        result["health_port"] = ("127.0.0.1" if socket_path(config.host) else host, config.health_port)
    if config.metrics_port is not None:
        result["metrics_port"] = (config.metrics_host, config.metrics_port)
    if config.page.enabled:
        result["page.port"] = (config.page.host, config.page.port)
    return {name: (host, port) for name, (host, port) in result.items() if port}


def _strange_placements(config: ServerConfig) -> list[str]:
    return [
        f"[cluster.models.{model_id}] places a model that is not configured{_hint(model_id, config)}"
        for model_id in sorted(config.cluster.models.keys() - config.models.keys())
    ]


def _hint(model_id: str, config: ServerConfig) -> str:
    near = nearest(model_id, config.models, 1)
    return f"; nearest: {near[0]}" if near else f"; add [models.{model_id}], or remove the placement"
