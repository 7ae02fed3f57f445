"""Server features: each with its state, and the setting that turns it on."""

from collections.abc import Iterator
from pathlib import Path

import torch

from trocar_server.app.server_id import ServerId
from trocar_server.config import ServerConfig
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.engine import Engine
from trocar_server.engine.request.numerics import Numerics
from trocar_server.rpc.listen.unix_socket import socket_path
from trocar_server.rpc.services.operator import Feature
from trocar_server.training.trainers import Trainers


def features(
    config: ServerConfig, engine: Engine, trainers: Trainers, own_id: ServerId, traces_off: str
) -> list[Feature]:
    """Every feature; a disabled one names the setting that enables it. For `traces_off`, see `Telemetry`."""
    return [
        *_numerics(config, engine),
        *_device(config, engine),
        *_memory(config),
        *_state(trainers, own_id),
        *_models(engine),
        *_access(config, traces_off),
    ]


def _numerics(config: ServerConfig, engine: Engine) -> Iterator[Feature]:
    settings, device = config.engine, engine.owner.device
    uses, compiles = settings.openvino, bool(settings.compile_after)
    result = available_numerics(device, compiles=compiles, uses_openvino=uses)
    for numerics in (Numerics.FAST, Numerics.BF16):
        yield Feature(numerics.value, result[numerics] or "")
    if device.type == "cpu":
        yield Feature("openvino", available_numerics(device, uses_openvino=uses)[Numerics.FAST] or "")
    else:
        yield Feature("openvino", f"it runs models on a CPU; these run on {device}")


def _device(config: ServerConfig, engine: Engine) -> Iterator[Feature]:
    is_cuda = engine.owner.device.type == "cuda"
    if torch.cuda.is_available():
        why = f"switched off: device = {config.device!r}"
    else:
        why = "PyTorch finds no CUDA GPU here" if torch.version.cuda else "PyTorch was built without CUDA"
    yield Feature("cuda", "" if is_cuda else why)
    graphs = "" if config.engine.cuda_graphs else "switched off: engine.cuda_graphs = false"
    yield Feature("cuda_graphs", graphs if is_cuda else "the models do not run on a CUDA GPU")


def _memory(config: ServerConfig) -> Iterator[Feature]:
    limits = config.limits
    yield Feature("reply_cache", "" if limits.feature_cache_bytes else "limits.feature_cache_bytes is 0")
    if socket_path(config.host) is None:
        shared = "only for clients of a Unix socket: host = 'unix:/path'"
    else:
        shared = "" if limits.max_shared_memory_bytes else "limits.max_shared_memory_bytes is 0"
        shared = shared or ("" if Path("/dev/shm").is_dir() else "there is no /dev/shm")
    yield Feature("shared_memory", shared)


def _state(trainers: Trainers, own_id: ServerId) -> Iterator[Feature]:
    problem = trainers.storage_problem
    lost = len(trainers.unreadable())
    note = f"{lost} trainers cannot be read; their owners see the reason" if lost else ""
    yield Feature("training", "" if problem is None else problem.message, note)
    yield Feature("server_id", own_id.problem)


def _models(engine: Engine) -> Iterator[Feature]:
    failed = [entry for entry in engine.catalogue.entries() if entry.error_message]
    yield Feature("models", "; ".join(f"{entry.spec.model_id}: {entry.error_message}" for entry in failed))


def _access(config: ServerConfig, traces_off: str) -> Iterator[Feature]:
    yield Feature("tls", "" if config.tls_cert else "tls_cert and tls_key are not set: plain text")
    yield Feature("tokens", "" if config.tokens else "tokens = false: calls need none")
    yield Feature("client_certificates", "" if config.tls_client_ca else "tls_client_ca is not set")
    yield Feature("page", "" if config.page.enabled else "page.enabled = false")
    yield Feature("metrics", "" if config.metrics_port is not None else "metrics_port is not set")
    yield Feature("traces", traces_off)
    yield Feature("reflection", "" if config.reflection else "reflection = false")
