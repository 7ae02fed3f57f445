"""Statistics over a stream equal NumPy's of all values in float64, whatever the values and the breaks."""

import multiprocessing
import random
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.oracle import Array
from tests.support.servers.proxy import running_proxy
from tests.support.servers.running_server import RunningServer
from tests.unit.tensors.stats.oracle import PLAIN, assert_same, expected
from trocar_server.tensors.stats import Scope, Statistic

SIZES = [1, 4, 1, 7, 2, 1, 30, 3]
NAMES: list[Any] = [str(statistic) for statistic in PLAIN]


def rows(kind: str) -> list[Array]:
    """Return batches of (rows, 3) float64."""
    chance = np.random.default_rng(11)
    parts = [chance.normal(size=(size, 3)) for size in SIZES]
    if kind == "offset":
        return [1e8 + part for part in parts]
    if kind == "nan":
        parts[3][2, 1] = np.nan
    if kind == "inf":
        parts[1][0, 0], parts[4][1, 2] = np.inf, -np.inf
    if kind == "both infinities":
        parts[1][0, 0], parts[6][5, 0] = np.inf, -np.inf
    if kind == "constant":
        parts = [np.full_like(part, 0.1) for part in parts]
    if kind == "jump":
        parts = [part + (1e12 if index % 2 else -1e12) for index, part in enumerate(parts)]
    if kind == "tiny and huge":
        parts = [part * 10.0 ** (20 * index - 80) for index, part in enumerate(parts)]
    if kind == "one element":
        parts = parts[:1]
    return parts


KINDS = ["plain", "offset", "nan", "inf", "both infinities", "constant", "jump", "one element"]


def tap(over: str, *more: Any) -> trocar.Tap:
    return trocar.tap("/in", alias="it", stats=[*NAMES, *more], over=over, values=False)  # type: ignore[arg-type]


def running(
    client: trocar.Client, batches: Sequence[Any], taps: Any, **options: Any
) -> tuple[list[trocar.BatchResult], dict[str, trocar.Statistics]]:
    with client.extract_stream("identity", batches, taps, running_statistics=True, **options) as stream:
        results = list(stream)
    return results, dict(stream.statistics)


def numbers(found: trocar.Statistics) -> dict[Statistic, list[float]]:
    return {kind: np.atleast_1d(getattr(found, str(kind))).astype(float).tolist() for kind in PLAIN}


@pytest.mark.parametrize("over", ["all", "channel"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_numpys_of_all_values(client: trocar.Client, kind: str, over: str) -> None:
    batches = rows(kind)
    everything = np.concatenate(batches)
    _, found = running(client, batches, tap(over))
    with np.errstate(all="ignore"):
        assert_same(numbers(found["it"]), expected(everything, Scope(over)), everything)


@pytest.mark.parametrize("kind", ["plain", "offset", "jump"])
def test_covariance_quantiles_and_histogram_too(client: trocar.Client, kind: str) -> None:
    batches = rows(kind)
    everything = np.concatenate(batches)
    shares = [0.0, 0.25, 0.5, 1.0]
    more = [trocar.quantiles(*shares), trocar.histogram(bins=16), "covariance"]
    _, found = running(client, batches, tap("channel", *more))
    of = found["it"]
    assert of.covariance is not None
    scale = np.abs(everything).max() if kind == "jump" else np.ptp(everything)
    np.testing.assert_allclose(
        of.covariance, np.cov(everything, rowvar=False, ddof=0), rtol=1e-9, atol=1e-12 * scale
    )
    np.testing.assert_allclose(
        np.asarray(of.quantiles).reshape(3, -1), np.quantile(everything, shares, axis=0).T, rtol=1e-14
    )
    assert of.histogram is not None
    for channel in range(3):
        counts = np.histogram(everything[:, channel], of.histogram.edges)[0]
        assert np.asarray(of.histogram.counts)[channel].tolist() == counts.tolist()
        assert counts.sum() == len(everything)


ALL = [
    tap("all"),
    trocar.tap("/in", alias="by", stats=["mean", "covariance", trocar.quantiles(0.5)], over="channel"),
]


def bits(found: dict[str, trocar.Statistics]) -> dict[str, list[bytes]]:
    """Return every number as bytes: NaN equals NaN, and 0.0 is not -0.0."""
    values: dict[str, list[bytes]] = {}
    for name, of in found.items():
        values[name] = [
            np.asarray(getattr(of, key), np.float64).tobytes()
            for key in (*NAMES, "covariance", "quantiles")
            if getattr(of, key, None) is not None
        ]
    return values


@pytest.mark.parametrize("position", range(1, len(SIZES) + 1))
def test_a_failed_batch_moves_no_bit_wherever_it_comes(client: trocar.Client, position: int) -> None:
    """One fails before its pass; one after it, because its channels differ from those of before."""
    batches: list[Any] = list(rows("nan"))
    expected_bits = bits(running(client, batches, ALL)[1])
    for bad in (np.zeros((2, 5)), np.zeros((0, 3)), "no-such-file.jpg"):
        mixed = [*batches[:position], bad, *batches[position:]]
        results, found = running(client, mixed, ALL, checkpoint_interval=1)
        assert [result.error is not None for result in results].count(True) == 1
        assert results[position].error is not None
        assert bits(found) == expected_bits


@pytest.mark.parametrize("kind", ["nan", "offset", "jump"])
def test_broken_connections_move_no_bit(server: RunningServer, client: trocar.Client, kind: str) -> None:
    batches = rows(kind) * 3
    expected_bits = bits(running(client, batches, ALL)[1])
    chance = random.Random(kind)
    with (
        running_proxy(server.address) as proxy,
        trocar.connect(proxy.address) as far,
        far.extract_stream(
            "identity", batches, ALL, running_statistics=True, checkpoint_interval=4
        ) as stream,
    ):
        for result in stream:
            assert result.error is None
            if chance.random() < 0.3:
                proxy.break_connections()
        assert proxy.connection_count > 2
    assert bits(dict(stream.statistics)) == expected_bits


@pytest.mark.parametrize("window", [1, 4])
def test_arrays_that_are_refilled_after_their_result_are_sent_again_as_they_were(
    server: RunningServer, client: trocar.Client, window: int
) -> None:
    everything = np.random.default_rng(3).normal(size=(24, 8, 3))
    buffers = np.empty((window, 8, 3))

    def refilled() -> Iterator[Array]:
        for index, values in enumerate(everything):
            buffer = buffers[index % window]
            buffer[:] = values
            yield buffer

    with (
        running_proxy(server.address) as proxy,
        trocar.connect(proxy.address) as far,
        far.extract_stream(
            "identity", refilled(), ALL, running_statistics=True, window=window, checkpoint_interval=10
        ) as stream,
    ):
        for result in stream:
            assert result.error is None
            if result.index % 4 == 3:
                proxy.break_connections()
        assert proxy.connection_count > 2
    flat = everything.reshape(-1, 3)
    assert_same(numbers(stream.statistics["it"]), expected(flat, Scope.ALL), flat)
    assert bits(dict(stream.statistics)) == bits(running(client, list(everything), ALL)[1])


def _serve(pipe: Connection) -> None:
    from tests.support.models.odd_models import Identity
    from tests.support.servers.running_server import running_server
    from tests.support.servers.serving import custom

    with running_server(models={"identity": custom(Identity)}, device="cpu") as other:
        pipe.send(other.address)
        pipe.recv()


@pytest.fixture
def other_process() -> Iterator[str]:
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    process = spawn.Process(target=_serve, args=(theirs,))
    process.start()
    yield ours.recv()
    ours.send(None)
    process.join()


def test_a_checkpoint_goes_on_in_another_server_without_a_changed_bit(
    client: trocar.Client, other_process: str
) -> None:
    batches = rows("offset")
    whole = bits(running(client, batches, ALL)[1])
    results, _ = running(client, batches[:5], ALL, checkpoint_interval=1)
    with trocar.connect(other_process) as far:
        for position, result in enumerate(results, 1):
            options: Any = {"checkpoint": result.checkpoint, "first_batch": position}
            assert bits(running(far, batches[position:], ALL, **options)[1]) == whole


@pytest.mark.parametrize(
    "reduce",
    [
        [trocar.index(np.s_[:, 1:3])],
        [trocar.channels([2, 0])],
        [trocar.top_k(2)],
        [trocar.project(2, seed=3)],
        [trocar.pca(np.eye(2, 3, dtype=np.float32))],
    ],
)
def test_reduced_values_go_on_from_checkpoint_to_checkpoint(
    client: trocar.Client, reduce: list[trocar.Reduction]
) -> None:
    """What comes with a checkpoint was reduced already: it must not be taken for what is to be reduced."""
    taps = [trocar.tap("/in", stats=["mean", "std"], over="channel", reduce=reduce, values=False)]
    batches = [part.astype(np.float32) for part in rows("plain")]
    whole = running(client, batches, taps)[1]
    checkpoint: bytes | None = None
    found: dict[str, trocar.Statistics] = {}
    for index, batch in enumerate(batches):
        options: Any = {"checkpoint": checkpoint, "first_batch": index, "checkpoint_interval": 1}
        (result,), found = running(client, [batch], taps, **options)
        checkpoint = result.checkpoint
    assert found == whole


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "float16", "float64"])
def test_the_dtype_of_what_they_are_of_survives_a_checkpoint(client: trocar.Client, dtype: str) -> None:
    taps = [trocar.tap("/in", stats=["mean"], values=False)]
    batch = np.ones((2, 3), dtype)
    (result,), _ = running(client, [batch], taps, checkpoint_interval=1)
    options: Any = {"running_statistics": True, "checkpoint": result.checkpoint, "first_batch": 1}
    with client.extract_stream("identity", [batch], taps, **options) as stream:
        assert next(stream).error is None
        assert list(stream) == []
    assert stream.info["/in"].dtype == dtype
    assert stream.info["/in"].shape == (4, 3)
