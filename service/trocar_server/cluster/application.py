"""Application builders of Ray Serve, for its configuration files and for KubeRay's RayService.

applications:
  - name: trocar-resnet50
    import_path: trocar_server.cluster.application:model
    args: {config: /etc/trocar/cluster.toml, model_id: resnet50}
  - name: trocar
    import_path: trocar_server.cluster.application:gateway
    args: {config: /etc/trocar/cluster.toml}

`trocar serve --ray` deploys the same applications without such a file.
"""

from pathlib import Path

from ray import serve

from trocar_api.reasons import ErrorReason
from trocar_server.cluster.deploying import check, placements, prepare, with_absolute_paths
from trocar_server.cluster.deployments import gateway_target, model_target
from trocar_server.config import ServerConfig, read_config
from trocar_server.errors import unknown


def model(args: dict[str, str]) -> serve.Application:
    """Return the application of one model.

    Args:
        args: `config`, the path of the configuration on every node; `model_id`.

    Raises:
        ServiceError: The configuration cannot be read or run here, or has no such model.
    """
    config, model_id = _prepared(args), args["model_id"]
    known = placements(config)
    if model_id not in known:
        raise unknown(ErrorReason.UNKNOWN_MODEL, "model", model_id, known, f"configured: {', '.join(known)}")
    return model_target(model_id, config, known[model_id]).target


def gateway(args: dict[str, str]) -> serve.Application:
    """Return the application of the gateways.

    Args:
        args: `config`, the path of the configuration on every node.

    Raises:
        ServiceError: The configuration cannot be read or run here.
    """
    return gateway_target(_prepared(args)).target


def _prepared(args: dict[str, str]) -> ServerConfig:
    """Read the configuration; nodes that have what the models need may join later."""
    config = with_absolute_paths(read_config(Path(args["config"])))
    check(config)
    prepare(config)
    return config
