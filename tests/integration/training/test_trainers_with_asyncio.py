"""Trainers, fits and data sets of the asyncio client, against plain torch and the other client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import trocar
from tests.support.oracles.tiny_training import (
    MODELS,
    SEED,
    PlainTrainer,
    assert_weights,
    batches,
    fitted_plainly,
    make_trainer,
    samples,
    stepped_plainly,
)
from trocar.errors import TrainerInvalidError, UnknownDatasetError, UnknownModelError, UnknownTrainerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.support.servers.proxy import Proxy
    from tests.support.servers.running_server import RunningServer
    from tests.support.servers.serving import Serve

OPTIMIZER = trocar.training.sgd(lr=0.05, momentum=0.9)
IMAGES, LABELS = samples(4)


@pytest.fixture
def running(serve: Serve, tmp_path: Path) -> RunningServer:
    return serve(models=MODELS, data_dir=tmp_path / "data")


@pytest.fixture
async def own(running: RunningServer) -> AsyncIterator[trocar.AsyncClient]:
    async with trocar.aio.connect(running.address) as connected:
        yield connected


def assert_same(found: Any, expected: Any) -> None:
    """Compare mappings of arrays, bit by bit."""
    assert dict(found).keys() == dict(expected).keys()
    for name, value in dict(expected).items():
        assert np.asarray(found[name]).tobytes() == np.asarray(value).tobytes(), name


async def test_trainers_that_step_at_once_are_where_plain_torch_is(
    own: trocar.AsyncClient, client: trocar.Client, tmp_path: Path
) -> None:
    given = [batches(6), [samples(4, 100 + seed) for seed in range(6)]]
    trainers = [await own.train("tiny", optimizer=OPTIMIZER, seed=SEED) for _ in given]

    async def train(trainer: trocar.training.AsyncTrainer, mine: list[Any]) -> list[float]:
        return [(await trainer.step(*batch)).loss for batch in mine]

    losses = await asyncio.gather(*map(train, trainers, given))
    for trainer, mine, found in zip(trainers, given, losses, strict=True):
        plain = PlainTrainer()
        assert found == [plain.step(batch) for batch in mine]
        assert_weights(client.trainer(trainer.trainer_id), plain.model, tmp_path)


async def test_every_call_of_a_trainer_answers_as_with_the_other_client(
    own: trocar.AsyncClient, client: trocar.Client, tmp_path: Path
) -> None:
    theirs = make_trainer(client)
    async with await own.train("tiny", optimizer=OPTIMIZER, seed=SEED) as ours:
        mine, other = await ours.forward_backward(IMAGES, LABELS), theirs.forward_backward(IMAGES, LABELS)
        assert mine == replace(other, compute_s=mine.compute_s)
        assert_same(await ours.parameter_gradients(), theirs.parameter_gradients())
        assert (await ours.optimizer_step()).is_update
        theirs.optimizer_step()
        assert (await ours.evaluate(IMAGES, LABELS)) == theirs.evaluate(IMAGES, LABELS)
        assert (await ours.predict(IMAGES)).tobytes() == theirs.predict(IMAGES).tobytes()
        assert_same(await ours.extract(IMAGES, ["fc"]), theirs.extract(IMAGES, ["fc"]))
        of = trocar.logit(1)
        assert_same(await ours.gradients(IMAGES, of=of), theirs.gradients(IMAGES, of=of))
        await ours.export(tmp_path / "ours.safetensors", optimizer=True)
        theirs.export(tmp_path / "theirs.safetensors", optimizer=True)
        assert (tmp_path / "ours.safetensors").read_bytes() == (tmp_path / "theirs.safetensors").read_bytes()
        info = await ours.info()
        assert (info.update_count, info.next_number) == (1, 2)
        again = await own.trainer(ours.trainer_id)
        assert replace(await again.info(), expires_at=info.expires_at) == info
        assert ours.trainer_id in {one.trainer_id for one in await own.trainers()}
    with pytest.raises(UnknownTrainerError):
        await ours.info()
    await ours.close()


async def test_a_checkpoint_is_restored_and_published(
    own: trocar.AsyncClient, client: trocar.Client, tmp_path: Path
) -> None:
    given = batches(4)
    trainer = await own.train("tiny", optimizer=OPTIMIZER, seed=SEED)
    for batch in given[:2]:
        await trainer.step(*batch)
    saved = await trainer.save("two steps")
    await trainer.step(*samples(4, 50))
    assert (await trainer.restore(saved.number)).update_count == 2
    for batch in given[2:]:
        await trainer.step(*batch)
    assert [one.note for one in await trainer.checkpoints()] == ["two steps"]
    assert_weights(client.trainer(trainer.trainer_id), stepped_plainly(given), tmp_path)
    assert await trainer.publish("mine") == "mine"
    assert_same(await own.extract("mine", IMAGES, "fc"), await trainer.extract(IMAGES, "fc"))
    await own.unpublish("mine")
    with pytest.raises(UnknownModelError):
        await own.model("mine")


async def test_an_adapter_moves_from_one_trainer_to_another(own: trocar.AsyncClient, tmp_path: Path) -> None:
    options: Any = {"lora": trocar.training.lora({"fc": 2}), "optimizer": trocar.training.sgd(lr=0.5)}
    first, second = await own.train("tiny", **options), await own.train("tiny", **options)
    await first.step(IMAGES, LABELS)
    await second.load_adapter(await first.export_adapter(tmp_path / "adapter"))
    assert (await first.predict(IMAGES)).tobytes() == (await second.predict(IMAGES)).tobytes()
    plain = await own.train("tiny", optimizer=OPTIMIZER)
    with pytest.raises(TrainerInvalidError):
        await plain.export_adapter(tmp_path / "none")


async def test_a_fit_is_paused_resumed_and_watched_beside_another(
    own: trocar.AsyncClient, client: trocar.Client, tmp_path: Path
) -> None:
    data = samples(40, 11)
    expected, losses = fitted_plainly(data, 12, 4)
    paused, other = [await own.train("tiny", optimizer=OPTIMIZER, seed=SEED) for _ in range(2)]
    states = []

    async def watched() -> list[float]:
        first = await paused.start_fit(data, epochs=12, batch_size=4)
        found = []
        async for event in paused.watch(first):
            if event.kind == "step":
                found.append(event["loss"])
            if event.kind == "step" and len(found) == 3:
                states.append(await paused.pause())
            if event.kind == "paused":
                states.append(await paused.resume())
        return found

    async def whole() -> list[float]:
        history = await other.fit(data, epochs=12, batch_size=4, progress=False)
        return list(history.losses)

    assert list(await asyncio.gather(watched(), whole())) == [losses, losses]
    assert states == ["paused", "running"]
    for trainer in (paused, other):
        assert_weights(client.trainer(trainer.trainer_id), expected, tmp_path)


async def test_a_cancelled_fit_ends_and_its_trainer_goes_on(own: trocar.AsyncClient) -> None:
    trainer = await own.train("tiny", optimizer=OPTIMIZER, seed=SEED)
    await trainer.start_fit(samples(40, 11), epochs=1_000, batch_size=4)
    await trainer.cancel()
    history = await trainer.wait(progress=False)
    assert (await trainer.info()).update_count == len(history.losses) < 10_000
    assert (await trainer.step(IMAGES, LABELS)).is_update


async def test_data_sets_are_stored_once_listed_and_deleted(
    own: trocar.AsyncClient, client: trocar.Client
) -> None:
    told: list[Any] = []
    stored = await own.upload_dataset(samples(40, 11), name="forty", progress=told.append)
    assert stored == client.upload_dataset(samples(40, 11), name="forty")
    assert told
    assert (await own.datasets()) == client.datasets()
    assert (await own.dataset(stored.dataset_id)).sample_count == 40
    await own.delete_dataset(stored.dataset_id)
    with pytest.raises(UnknownDatasetError):
        await own.dataset(stored.dataset_id)


async def test_through_broken_connections_nothing_is_lost_or_doubled(
    proxy: Proxy, client: trocar.Client, tmp_path: Path
) -> None:
    given, data = batches(20), samples(40, 11)
    expected, losses = fitted_plainly(data, 20, 4)
    async with trocar.aio.connect(proxy.address) as own:
        stepped = await own.train("tiny", optimizer=OPTIMIZER, seed=SEED)
        fitted = await own.train("tiny", optimizer=OPTIMIZER, seed=SEED)
        for number, batch in enumerate(given):
            call = asyncio.ensure_future(stepped.step(*batch))
            await asyncio.sleep(0)
            proxy.break_connections()
            assert (await call).update_count == number + 1
        seen = []
        first = await fitted.start_fit(data, epochs=20, batch_size=4)
        async for event in fitted.watch(first):
            seen.append(event)
            if event.number % 20 == 0:
                proxy.break_connections()
    assert [event.number for event in seen] == list(range(first, first + len(seen)))
    assert [event["loss"] for event in seen if event.kind == "step"] == losses
    assert_weights(client.trainer(stepped.trainer_id), stepped_plainly(given), tmp_path)
    assert_weights(client.trainer(fitted.trainer_id), expected, tmp_path)
