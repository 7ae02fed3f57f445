"""Status of an engine for its operator: queues, callers and caches at this moment."""

from collections import Counter
from dataclasses import dataclass

from trocar_server.engine.engine import Engine
from trocar_server.engine.reply_cache import ReplyCache


@dataclass(frozen=True)
class QueueStatus:
    """The queue of one model in memory."""

    model_id: str
    replica_count: int
    leased_count: int
    """Replicas that run a pass; a running group of compiled calls counts as one."""
    waiting_count: int
    """Calls that wait for a replica or a compiled pass."""
    pending_s: float
    """Estimated seconds of computing that running and waiting calls still need."""


@dataclass(frozen=True)
class CallerStatus:
    """Work of one flow, or of all together."""

    flow: str
    """Empty for the server's own work."""
    call_count: int
    """Admitted calls."""
    waiting_count: int
    """Of these, calls that wait for a replica or a compiled pass."""
    byte_count: int
    """Reserved bytes of inputs and replies."""
    pending_s: float
    """Reserved seconds of computing."""
    used_s: float
    """Seconds of computing in about the last minute."""


@dataclass(frozen=True)
class CacheStatus:
    """One cache."""

    name: str
    entry_count: int
    byte_count: int
    max_bytes: int
    """Its limit; 0 if it is off."""
    hit_count: int
    """Since the server started, as are misses."""
    miss_count: int


@dataclass(frozen=True)
class DeviceStatus:
    """The work that runs on the device."""

    user: str
    """The model or trainer that it is for; empty where nothing runs, or work for neither."""
    held_s: float
    """Seconds for which it has held the device."""
    is_over_limit: bool
    """Whether that is longer than `max_pass_s`."""


@dataclass(frozen=True)
class EngineStatus:
    """Queues, callers, caches and the device; callers with the most work first."""

    queues: tuple[QueueStatus, ...]
    callers: tuple[CallerStatus, ...]
    total: CallerStatus
    caches: tuple[CacheStatus, ...]
    device: DeviceStatus


def status_of(engine: Engine) -> EngineStatus:
    """Read the status; on the engine's event loop."""
    callers = _callers(engine)
    byte_count, pending_s, call_count = engine.admission.reserved()
    total = CallerStatus(
        flow="",
        call_count=call_count,
        waiting_count=sum(one.waiting_count for one in callers),
        byte_count=byte_count,
        pending_s=pending_s,
        used_s=sum(one.used_s for one in callers),
    )
    return EngineStatus(_queues(engine), callers, total, (_reply_cache(engine.replies),), device_of(engine))


def device_of(engine: Engine) -> DeviceStatus:
    """Read what holds the device."""
    holder = engine.owner.holder
    if holder is None:
        return DeviceStatus("", 0.0, is_over_limit=False)
    held_s = holder.held_s
    return DeviceStatus(holder.user, held_s, held_s > engine.limits.max_pass_s)


def _queues(engine: Engine) -> tuple[QueueStatus, ...]:
    return tuple(queue_of(engine, model_id) for model_id in sorted(engine.deployments))


def queue_of(engine: Engine, model_id: str) -> QueueStatus:
    """Read the queue of one model: the calls on its replicas and on its compiled variants."""
    deployment = engine.deployments[model_id]
    pool, compiled = deployment.pool, engine.compiled.queues(deployment)
    running_count = pool.leased_count + sum(queue.is_running for queue in compiled)
    return QueueStatus(
        model_id,
        pool.count,
        min(running_count, pool.count),
        pool.waiting_count + sum(queue.waiting_count for queue in compiled),
        pool.pending_s + sum(queue.pending_s for queue in compiled),
    )


def _callers(engine: Engine) -> tuple[CallerStatus, ...]:
    waiting: Counter[str] = Counter()
    for deployment in engine.deployments.values():
        waiting.update(deployment.pool.waiting_counts())
        for queue in engine.compiled.queues(deployment):
            waiting.update(queue.waiting_counts())
    used = engine.owner.recent_use()
    result = []
    for flow in {*engine.admission.flows(), *waiting, *used}:
        byte_count, pending_s, call_count = engine.admission.reserved(flow)
        result.append(
            CallerStatus(flow, call_count, waiting[flow], byte_count, pending_s, used.get(flow, 0.0))
        )
    return tuple(sorted(result, key=lambda one: (-one.pending_s, -one.used_s, -one.call_count, one.flow)))


def _reply_cache(cache: ReplyCache) -> CacheStatus:
    return CacheStatus(
        "replies", len(cache), cache.byte_count, cache.max_bytes, cache.hit_count, cache.miss_count
    )
