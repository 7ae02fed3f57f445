"""Models that come, go and change while the engine runs.

    host = await build(engine, spec, replicas=2)       # beside the old one; nobody sees it yet
    put(engine, host, replicas=2)                      # the next call runs on it

Calls that are under way hold the host that they began with: they end on the old one, which goes with the last
of them. For that time both are in memory.
"""

import asyncio

from trocar_server.engine.engine import Engine
from trocar_server.engine.hosting import Host, make_host
from trocar_server.models import ModelSpec, load_model, prefetch_weights


async def build(engine: Engine, spec: ModelSpec, replicas: int) -> Host:
    """Load a model that nobody sees yet.

    Raises:
        ServiceError: Whatever makes loading impossible.
    """
    await asyncio.to_thread(prefetch_weights, spec, engine._data_dir)

    def make() -> Host:
        hosted = load_model(spec, engine.owner.device, engine._data_dir)
        return make_host(hosted, replicas, engine.limits.max_queue)

    return await engine.owner.run(make)


def put(engine: Engine, host: Host, replicas: int) -> None:
    """Let the next call of this id run on a model; what had the id before is forgotten."""
    model_id = host.hosted.spec.model_id
    _forget(engine, model_id)
    engine._hosts[model_id] = host
    engine._replica_counts[model_id] = replicas
    engine.catalogue.put(host.hosted)


def take_out(engine: Engine, model_id: str) -> None:
    """Forget a model; calls that are under way finish on it."""
    _forget(engine, model_id)
    engine.catalogue.release(model_id)


def _forget(engine: Engine, model_id: str) -> None:
    host = engine._hosts.pop(model_id, None)
    if host is not None:
        engine.compiled.forget(host)
