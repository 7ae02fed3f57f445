"""A fit over an uploaded data set ends with the bits of one over the same arrays in memory."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.wire.shards import shard_of, upload
from tests.unit.training.fits import dataset, fit_of, run_fit, shown_core
from tests.unit.training.trainers import TinyNet, assert_same, tiny
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets import DatasetLibrary, DatasetReader, DatasetStore
from trocar_server.training.datasets.reader import LoadedSamples
from trocar_server.training.fit.fit import Fit
from trocar_server.training.fit.fit_samples import KEPT_BYTES, DatasetSamples, SamplePart
from trocar_server.training.spec.fit_spec import FitSpec

DATA = dataset(14)


@pytest.fixture
def reader(tmp_path: Path) -> DatasetReader:
    library = DatasetLibrary(DatasetStore(tmp_path / "sets", 1 << 24, 10_000), {}, 10_000)
    images, labels = DATA.images.numpy(), DATA.targets.numpy()
    shards = [
        (shard_of(inputs=images[i : i + 5], targets=labels[i : i + 5]), len(labels[i : i + 5]))
        for i in range(0, len(labels), 5)
    ]
    return library.open("alice", upload(library.store, "alice", *shards))


@pytest.mark.parametrize("mode", ["auto", "off"])
def test_uploaded_samples_train_as_those_in_memory(reader: DatasetReader, mode: str, tmp_path: Path) -> None:
    base = tiny(TinyNet)
    core, other = shown_core(base, trainable=["fc"]), shown_core(base, trainable=["fc"])
    samples = DatasetSamples(reader, base, seed=0)
    spec = FitSpec.model_validate(
        {"dataset_id": "d", "epochs": 3, "batch_size": 4, "feature_cache": {"mode": mode}}
    )
    run_fit(Fit(core, samples, samples, spec, tmp_path, lambda state: 1))
    samples.close()
    run_fit(fit_of(other, DATA, epochs=3, batch_size=4))

    assert_same(core.module, other.module)


def counted(reader: DatasetReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that every sample which the reader loads is added to."""
    loaded: list[int] = []
    load = reader.load

    def counting(indices: Sequence[int]) -> LoadedSamples:
        loaded.extend(indices)
        return load(indices)

    monkeypatch.setattr(reader, "load", counting)
    return loaded


def test_an_evaluation_set_is_read_once(
    reader: DatasetReader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = counted(reader, monkeypatch)
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0, kept_bytes=KEPT_BYTES)
    spec = FitSpec.model_validate(
        {"dataset_id": "d", "epochs": 3, "batch_size": 4, "feature_cache": {"mode": "off"}}
    )
    fit = Fit(shown_core(tiny(TinyNet)), DATA, samples, spec, tmp_path, lambda state: 1)
    loaded.clear()  # the check before the fit reads a sample or two
    events = run_fit(fit)
    samples.close()
    assert len([event for event in events if event.kind == "evaluation"]) == 3
    assert sorted(loaded) == list(range(14))


def test_samples_are_kept_while_there_is_room(reader: DatasetReader, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = counted(reader, monkeypatch)
    batch_bytes = DATA.images[:2].numpy().nbytes + DATA.targets[:2].numpy().nbytes
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0, kept_bytes=batch_bytes)
    for _ in range(2):
        for indices in ([0, 1], [2, 3]):
            assert torch.equal(samples.batch(torch.tensor(indices)).kwargs["x"], DATA.images[indices])
    samples.close()
    assert loaded == [0, 1, 2, 3, 2, 3]


def test_a_batch_that_is_changed_in_place_leaves_kept_samples_as_they_are(reader: DatasetReader) -> None:
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0, kept_bytes=KEPT_BYTES)
    samples.batch(torch.tensor([0, 1])).kwargs["x"].zero_()
    assert torch.equal(samples.batch(torch.tensor([0, 1])).kwargs["x"], DATA.images[:2])
    samples.close()


def test_a_part_has_its_own_samples_of_the_whole(reader: DatasetReader) -> None:
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0)
    part = SamplePart(samples, torch.tensor([9, 3, 5]))
    part.announce(torch.tensor([2, 0]))
    batch = part.batch(torch.tensor([2, 0]))
    assert torch.equal(batch.kwargs["x"], DATA.images[[5, 9]])
    assert torch.equal(batch.targets[""], DATA.targets[[5, 9]])
    assert (len(part), part.input_shape, part.labels("")) == (3, (3, 8, 8), samples.labels(""))
    samples.close()


def test_what_was_announced_is_what_comes(reader: DatasetReader) -> None:
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0)
    samples.announce(torch.tensor([1, 2]))
    samples.announce(torch.tensor([9, 3]))
    for indices in ([9, 3], [4], [1, 2]):
        batch = samples.batch(torch.tensor(indices))
        assert torch.equal(batch.kwargs["x"], DATA.images[indices])
        assert torch.equal(batch.targets[""], DATA.targets[indices])
    samples.close()


def test_form_tells_labels_and_shape(reader: DatasetReader) -> None:
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0)
    assert samples.input_shape == (3, 8, 8)
    assert len(samples) == 14
    assert set(samples.labels("") or ()) == set(np.unique(DATA.targets.numpy()).tolist())
    assert samples.labels("depth") is None
    samples.close()


def test_failed_load_ahead_is_told_when_the_batch_is_due(
    reader: DatasetReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = DatasetSamples(reader, tiny(TinyNet), seed=0)
    whole = reader.load

    def broken(indices: object) -> None:
        raise ServiceError(ErrorReason.DATASET_CORRUPT, "a shard is damaged")

    monkeypatch.setattr(reader, "load", broken)
    samples.announce(torch.tensor([1]))
    with pytest.raises(ServiceError, match="damaged"):
        samples.batch(torch.tensor([1]))
    monkeypatch.setattr(reader, "load", whole)
    assert samples.batch(torch.tensor([1])).size == 1
    samples.close()
