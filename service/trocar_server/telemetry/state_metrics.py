"""State metrics: read on each scrape."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from trocar_server.cgroup_memory import memory_limit_bytes
from trocar_server.telemetry.snapshot import ServerState, Snapshot, disk_bytes
from trocar_server.training.step.core import STEPS
from trocar_server.training.step.saved_tensors import SPOOLED

_TRAINER_STATES = ("ready", "fitting", "paused", "broken")
_MODEL_STATES = ("unloaded", "loading", "loaded", "failed")


class StateMetrics:
    """Collector of a server's state.

    Args:
        state: The server's state.
        read: Returns a snapshot, from the thread that scrapes.
    """

    def __init__(self, state: ServerState, read: Callable[[], Snapshot]) -> None:
        self._state, self._read = state, read
        self._build = state.build

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that nothing is read at registration."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield every metric."""
        now = self._read()
        yield _gauge(
            "trocar_models", "Models of the catalogue, by state.", "state", now.models, _MODEL_STATES
        )
        yield _gauge("trocar_trainers", "Trainers.", "state", now.trainers, _TRAINER_STATES)
        replicas = now.replicas.items()
        for name, what, values in (
            ("trocar_replicas", "Replicas.", {model: one.count for model, one in replicas}),
            (
                "trocar_replicas_leased",
                "Replicas in use.",
                {model: one.leased for model, one in replicas},
            ),
            (
                "trocar_queue_length",
                "Calls waiting for a replica.",
                {model: one.waiting for model, one in replicas},
            ),
        ):
            yield _gauge(name, what, "model", values)
        held = "Seconds for which the work that runs now has held the device."
        yield _gauge("trocar_device_held_seconds", held, "model", now.held)
        over = "1 for a model whose work has held the device for longer than max_pass_s."
        yield _gauge("trocar_device_over_limit", over, "model", now.over_limit)
        kept = "Texts that are generated now, each with keys and values in memory."
        yield GaugeMetricFamily("trocar_kept_caches", kept, value=now.cache_count)
        kept = "Bytes that their keys and values take when the most tokens have been generated."
        yield GaugeMetricFamily("trocar_kept_cache_bytes", kept, value=now.cache_bytes)
        recorded = CounterMetricFamily(
            "trocar_recorded_passes",
            "Passes recorded for input sizes that could not be predicted.",
            labels=("model",),
        )
        for model, count in now.recorded.items():
            recorded.add_metric((model,), count)
        yield recorded
        yield from self._bytes()
        yield from _totals()
        build = GaugeMetricFamily(
            "trocar_build_info",
            "Versions and device of the server; always 1.",
            labels=("version", "torch_version", "device"),
        )
        build.add_metric((self._build.version, self._build.torch_version, self._build.device), 1)
        yield build

    def _bytes(self) -> Iterator[Metric]:
        limit = GaugeMetricFamily(
            "trocar_memory_limit_bytes", "Memory limit of the process: of its container or of the machine."
        )
        limit.add_metric((), memory_limit_bytes())
        yield limit
        of_device = self._state.device_bytes
        yield _gauge("trocar_device_memory_bytes", "GPU memory; absent on a CPU.", "kind", of_device)
        disk = disk_bytes(self._state.data_dir)
        yield _gauge("trocar_disk_bytes", "Disk space of the data directory, spools included.", "kind", disk)


def _totals() -> Iterator[Metric]:
    written, read, waited_s = SPOOLED.sums()
    spooled = CounterMetricFamily(
        "trocar_spool_bytes", "Bytes of saved tensors written to and read from disk.", labels=("direction",)
    )
    spooled.add_metric(("written",), written)
    spooled.add_metric(("read",), read)
    yield spooled
    yield _counter("trocar_spool_wait_seconds", "Time that steps waited for the disk, in seconds.", waited_s)
    yield _counter("trocar_training_steps", "Batches processed by trainers.", STEPS.step_count)
    yield _counter("trocar_training_rows", "Samples processed by trainers.", STEPS.row_count)
    yield _counter("trocar_training_seconds", "Time to compute these batches, in seconds.", STEPS.compute_s)


def _counter(name: str, what: str, value: float) -> Metric:
    return CounterMetricFamily(name, what, value=value)


def _gauge(
    name: str, what: str, label: str, values: Mapping[str, float], always: Iterable[str] = ()
) -> Metric:
    family = GaugeMetricFamily(name, what, labels=(label,))
    result = dict.fromkeys(always, 0) | dict(values)
    for key, value in result.items():
        family.add_metric((key,), value)
    return family
