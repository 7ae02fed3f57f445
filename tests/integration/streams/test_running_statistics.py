"""Statistics over a whole stream: exact, unmoved by failed batches and broken connections, resumable."""

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.models.trainable_nets import SHAPE as TRAINED
from tests.support.oracles.oracle import Array, noise
from tests.support.oracles.tiny_training import MODELS, make_trainer
from tests.support.servers.proxy import running_proxy
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt

SIZES = [3, 1, 4, 1, 5, 2, 6, 5, 3, 5]
NAMES: list[Any] = ["mean", "std", "min", "l1", "skewness", "kurtosis", "count", "zero_fraction"]
TAPS = [
    trocar.tap("conv2", stats=[*NAMES, "covariance"], over="channel", values=False),
    trocar.tap("fc", stats=[*NAMES, trocar.quantiles(0.1, 0.5), trocar.histogram(bins=8)]),
    trocar.tap("fc/in", stats=["max"], over="sample", values=False),
]


def batch(index: int) -> Array:
    return noise(SIZES[index % len(SIZES)], 3, 8, 8, seed=index) * 1e3


def stream(client: trocar.Client, count: int, **options: Any) -> tuple[list[Any], dict[str, Any]]:
    options.setdefault("running_statistics", True)
    batches = (batch(index) for index in range(options.get("first_batch", 0), count))
    with client.extract_stream("plain", batches, TAPS, **options) as running:
        results = list(running)
    return results, dict(running.statistics)


@pytest.fixture(scope="module")
def whole(client: trocar.Client) -> dict[str, Any]:
    return stream(client, 40)[1]


def test_they_are_those_of_all_batches_together(client: trocar.Client, whole: dict[str, Any]) -> None:
    parts = [client.extract("plain", batch(index), ["conv2", "fc"]) for index in range(40)]
    conv = np.concatenate([maps["conv2"] for maps in parts]).astype(np.float64)
    logits = np.concatenate([maps["fc"] for maps in parts]).astype(np.float64)
    found = whole["conv2"]
    np.testing.assert_allclose(found.mean, conv.mean((0, 2, 3)), rtol=1e-12)
    np.testing.assert_allclose(found.std, conv.std((0, 2, 3)), rtol=1e-12)
    rows = conv.transpose(0, 2, 3, 1).reshape(-1, 4)
    np.testing.assert_allclose(found.covariance, np.cov(rows, rowvar=False, ddof=0), rtol=1e-10)
    assert found.count.tolist() == [len(rows)] * 4
    np.testing.assert_allclose(whole["fc"].quantiles, np.quantile(logits, [0.1, 0.5]), rtol=1e-12)
    counts, _ = np.histogram(logits, whole["fc"].histogram.edges)
    assert whole["fc"].histogram.counts.tolist() == counts.tolist()
    assert whole["fc"].count == logits.size


def test_batches_have_values_and_what_is_of_samples(client: trocar.Client) -> None:
    results, statistics = stream(client, 3)
    for index, result in enumerate(results):
        maps = result.unwrap()
        assert list(maps) == ["fc"]
        assert maps.stats.keys() == {"fc/in"}
        assert len(maps.stats["fc/in"].max) == SIZES[index]
    assert statistics.keys() == {"conv2", "fc"}


def test_without_them_every_batch_has_its_own(client: trocar.Client) -> None:
    results, statistics = stream(client, 2, running_statistics=False)
    assert statistics == {}
    assert results[1].unwrap().stats.keys() == {"conv2", "fc", "fc/in"}


def test_a_failed_batch_counts_in_none(client: trocar.Client) -> None:
    batches: list[Any] = [batch(0), noise(1, 4, 8, 8), batch(1), b"no image", batch(2)]
    with client.extract_stream("plain", batches, TAPS, running_statistics=True) as running:
        errors = [result.error is not None for result in running]
    assert errors == [False, True, False, True, False]
    assert dict(running.statistics) == stream(client, 3)[1]


@pytest.mark.parametrize("interval", [1, 5, 16])
def test_broken_connections_do_not_change_a_bit(
    server: RunningServer, client: trocar.Client, whole: dict[str, Any], interval: int
) -> None:
    chance = random.Random(interval)
    with running_proxy(server.address) as proxy, trocar.connect(proxy.address) as far:
        batches = (batch(index) for index in range(40))
        options: Any = {"running_statistics": True, "checkpoint_interval": interval}
        with far.extract_stream("plain", batches, TAPS, **options) as running:
            for expected, result in enumerate(running):
                assert result.index == expected
                assert result.error is None
                if chance.random() < 0.2:
                    proxy.break_connections()
        assert proxy.connection_count > 3
    assert dict(running.statistics) == whole
    assert np.array_equal(running.statistics["conv2"].covariance, whole["conv2"].covariance)


def test_a_checkpoint_goes_on_in_another_stream(client: trocar.Client, whole: dict[str, Any]) -> None:
    results, _ = stream(client, 23, checkpoint_interval=4)
    kept = [result for result in results if result.checkpoint is not None]
    assert [result.index for result in kept] == [3, 7, 11, 15, 19]
    assert stream(client, 40, checkpoint=kept[-1].checkpoint, first_batch=20)[1] == whole


def test_a_checkpoint_with_nothing_behind_it_gives_what_it_holds(client: trocar.Client) -> None:
    results, statistics = stream(client, 4, checkpoint_interval=4)
    assert stream(client, 4, checkpoint=results[-1].checkpoint, first_batch=4)[1] == statistics


def test_a_checkpoint_of_other_taps_or_damaged_is_refused(client: trocar.Client) -> None:
    results, _ = stream(client, 2, checkpoint_interval=1)
    checkpoint = results[-1].checkpoint
    assert checkpoint is not None
    other = trocar.tap("conv2", stats=["mean"], over="channel", values=False)
    chance = random.Random(5)
    for number in range(300):
        damaged = bytearray(checkpoint)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(len(damaged))] ^= 1 << chance.randrange(8)
        if number % 3 == 0:
            damaged = damaged[: chance.randrange(1, len(damaged))]
        running = client.extract_stream("plain", [], TAPS, running_statistics=True, checkpoint=bytes(damaged))
        with suppress(trocar.InvalidRequestError):  # a number that is another number is taken as it is
            list(running)
    with pytest.raises(trocar.errors.InvalidArgumentError, match="start again without it"):
        list(client.extract_stream("plain", [], other, running_statistics=True, checkpoint=checkpoint))


OF_LABELS = trocar.loss("cross_entropy", [1, 2])
HALVED = trocar.edit("conv", "scale", 0.5)


@pytest.mark.parametrize(
    ("of", "edits", "is_taken"),
    [
        (OF_LABELS, [HALVED], True),
        (trocar.loss("cross_entropy", [0, 3]), [HALVED], True),
        (OF_LABELS, [], False),
        (OF_LABELS, [trocar.edit("conv", "scale", 0.25)], False),
        (2 * OF_LABELS, [HALVED], False),
        (trocar.logit(1), [HALVED], False),
    ],
)
def test_a_checkpoint_of_other_edits_or_another_objective_is_refused(
    client: trocar.Client, of: trocar.Objective, edits: list[trocar.Edit], is_taken: bool
) -> None:
    tap = trocar.tap("conv2/grad_out", stats=["mean"], over="channel", values=False)

    def results(of: trocar.Objective, edits: list[trocar.Edit], **options: Any) -> list[trocar.BatchResult]:
        batches = [noise(2, 3, 8, 8)]
        with client.extract_stream(
            "plain",
            batches,
            tap,
            of=of,
            edits=edits,
            running_statistics=True,
            checkpoint_interval=1,
            **options,
        ) as running:
            return list(running)

    (first,) = results(OF_LABELS, [HALVED])
    if is_taken:
        assert results(of, edits, checkpoint=first.checkpoint, first_batch=1)[0].error is None
        return
    with pytest.raises(
        trocar.errors.InvalidArgumentError, match="other taps, edits or numerics, or another objective"
    ):
        results(of, edits, checkpoint=first.checkpoint, first_batch=1)


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[trocar.Client]:
    """A client of a server with two models of one kind, and with lists of edits."""
    models = {"plain": custom(Plain, (3, 8, 8)), "other": custom(Plain, (3, 8, 8))}
    with (
        running_server(models=models, device="cpu", data_dir=tmp_path_factory.mktemp("data")) as running,
        trocar.connect(running.address, retries=0) as connected,
    ):
        yield connected


def added(value: float) -> trocar.Edit:
    return trocar.edit("conv2", "add", np.full((4, 1, 1), value, np.float32))


def some_logits(*logits: int, **options: Any) -> trocar.Tap:
    rows = np.eye(5, dtype=np.float32)[list(logits)]
    return trocar.tap("fc", stats=["mean"], over="channel", reduce=[trocar.pca(rows)], **options)


def one_batch(client: trocar.Client, **changed: Any) -> trocar.BatchResult:
    """Return the result of a stream of one batch, with its checkpoint."""
    usual: dict[str, Any] = {"model_id": "plain", "taps": some_logits(0, 1), "edits": [added(0.0)]}
    usual["batches"] = [noise(2, 3, 8, 8)]
    options = {**usual, **changed, "running_statistics": True, "checkpoint_interval": 1}
    with client.extract_stream(**options) as running:
        (result,) = running
    return result


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"taps": some_logits(0, 1, values=False)}, True),  # measured alike, and sent otherwise
        ({"taps": some_logits(0, 2)}, False),
        ({"taps": some_logits(0, 1, alias="logits")}, False),
        ({"taps": [some_logits(0, 1), "conv"]}, False),
        ({"edits": [added(100.0)]}, False),
        ({"model_id": "other"}, False),
        ({"options": trocar.options(numerics="bf16")}, False),
        ({"options": trocar.options(merge=False, priority="low", timeout_s=60.0)}, True),
    ],
)
def test_a_checkpoint_of_another_computation_is_refused(
    own: trocar.Client, changed: dict[str, Any], is_taken: bool
) -> None:
    again: dict[str, Any] = {**changed, "checkpoint": one_batch(own).checkpoint, "first_batch": 1}
    if is_taken:
        assert one_batch(own, **again).error is None
        return
    with pytest.raises(
        trocar.errors.InvalidArgumentError,
        match="belongs to another model, or to other weights, code or settings of it",
    ):
        one_batch(own, **again)


def test_a_checkpoint_of_a_stored_list_that_was_changed_is_refused(own: trocar.Client) -> None:
    own.store_edits("plain", "mine", [added(0.0)])
    first = one_batch(own, edits="mine")
    again: dict[str, Any] = {"edits": "mine", "checkpoint": first.checkpoint, "first_batch": 1}
    assert one_batch(own, **again).error is None
    own.store_edits("plain", "mine", [added(100.0)], replace=True)
    with pytest.raises(
        trocar.errors.InvalidArgumentError, match="other taps, edits or numerics, or another objective"
    ):
        one_batch(own, **again)


class Scaled(Plain):
    """Has a setting that is not in its weights."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x * self.factor)


def resumes(
    client: trocar.Client, first: trocar.BatchResult, model_id: str = "plain", **options: Any
) -> bool:
    """Whether a stream resumes with the checkpoint of a result."""
    again = {**options, "checkpoint": first.checkpoint, "first_batch": 1}
    with suppress(trocar.errors.InvalidArgumentError):
        return one_batch(client, model_id=model_id, **again).error is None
    return False


def test_a_checkpoint_of_other_weights_is_refused(serve: Serve, tmp_path: Path) -> None:
    weights = tmp_path / "own.safetensors"
    models = {"plain": custom(Plain, (3, 8, 8), weights=str(weights))}
    save_file(rebuilt(Plain).state_dict(), weights)
    with trocar.connect(serve(models=models).address, retries=0) as own:
        first = one_batch(own)
        own.unload("plain")
        own.load("plain")
        assert resumes(own, first)
        own.unload("plain")
        save_file({name: value + 1 for name, value in rebuilt(Plain).state_dict().items()}, weights)
        own.load("plain")
        assert not resumes(own, first)


@pytest.mark.parametrize(
    ("changed", "is_taken"),
    [
        ({}, True),
        ({"options": {"factor": 2.0}}, False),
        ({"dtype": "bf16"}, False),
        ({"preprocessing": {"resize": [8, 8], "mean": [0.5] * 3, "std": [0.1] * 3}}, False),
    ],
)
def test_a_checkpoint_of_a_model_with_other_settings_is_refused(
    serve: Serve, changed: dict[str, Any], is_taken: bool
) -> None:
    """The second server is a restarted one: it has built the model again."""
    settings: dict[str, Any] = {"options": {"factor": 1.0}, "preprocessing": {"resize": [8, 8]}}
    checkpoints: list[trocar.BatchResult] = []
    edits = [trocar.edit("conv2", "scale", 0.5)]
    for given in (settings, {**settings, **changed}):
        server = serve(models={"plain": custom(Scaled, (3, 8, 8), **given)})
        with trocar.connect(server.address, retries=0) as own:
            if checkpoints:
                assert resumes(own, checkpoints[0], edits=edits) is is_taken
            else:
                checkpoints.append(one_batch(own, edits=edits))


def test_a_checkpoint_of_a_trainer_is_refused_after_a_step(serve: Serve, tmp_path: Path) -> None:
    images, labels = noise(2, *TRAINED), np.arange(2)
    tap = trocar.tap("fc", stats=["mean"], values=False)
    options: dict[str, Any] = {"taps": tap, "edits": [], "batches": [images]}
    with trocar.connect(serve(models=MODELS, data_dir=tmp_path).address, retries=0) as own:
        trainer = make_trainer(own)
        trainer_id = trainer.trainer_id
        trainer.step(images, labels)
        first = one_batch(own, model_id=trainer_id, **options)
        assert resumes(own, first, trainer_id, **options)
        trainer.save()
        trainer.step(images, labels)
        assert not resumes(own, first, trainer_id, **options)
        trainer.restore()
        assert resumes(own, first, trainer_id, **options)


def test_a_checkpoint_of_a_module_that_was_trained_meanwhile_is_refused() -> None:
    module = Plain().eval()
    with trocar.connect("local", models={"plain": {"module": module, "input_shape": [3, 8, 8]}}) as own:
        first = one_batch(own)
        assert resumes(own, first)
        with torch.no_grad():
            module.conv.weight += 1
        assert not resumes(own, first)


def test_other_channels_fail_their_batch_alone(client: trocar.Client) -> None:
    tap = trocar.tap("/in", stats=["mean"], over="channel", values=False)
    batches = [noise(2, 3, seed=1), noise(2, 5, seed=2), noise(2, 3, seed=3)]
    with client.extract_stream("identity", batches, tap, running_statistics=True) as running:
        errors = [result.error for result in running]
    assert [type(error) for error in errors] == [type(None), trocar.errors.InvalidArgumentError, type(None)]
    expected = np.concatenate([batches[0], batches[2]]).astype(np.float64).mean(0)
    np.testing.assert_allclose(running.statistics["/in"].mean, expected, rtol=1e-12)


def test_options_out_of_range_are_refused_at_once(client: trocar.Client) -> None:
    with pytest.raises(ValueError, match="running_statistics=True"):
        client.extract_stream("plain", [], "fc", checkpoint=b"x")
    with pytest.raises(ValueError, match="checkpoint_interval"):
        client.extract_stream("plain", [], "fc", running_statistics=True, checkpoint_interval=0)


def test_batches_of_other_sizes_count_in_the_shape(client: trocar.Client) -> None:
    tap = trocar.tap("conv", stats=["count"], over="channel", values=False)
    batches = [noise(2, 3, 8, 8), noise(3, 3, 16, 16)]
    with client.extract_stream("plain", batches, tap, running_statistics=True) as running:
        list(running)
    assert running.info["conv"].shape == (5, 4, 8, 8)
    assert np.array_equal(running.statistics["conv"].count, [2 * 64 + 3 * 256] * 4)
