"""Bulk: a folder of photos into files, against its slowest stage alone.

Reading, upload, decoding, the pass and writing should overlap, so that a run takes as long as the slowest of
them. Stages that need the same processor cores can overlap only where one leaves cores free; so besides two
networks there is a stand-in for one on another device, which waits as long as decoding takes.
"""

import io
import shutil
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from PIL import Image

import trocar
from benchmarks.measuring import Effort, images, in_turns
from benchmarks.report import Row, Table, row
from benchmarks.served import served
from trocar._base.tensors import Array

_ROUNDS, _PHOTOS, _BATCH = 3, 192, 32
_COPIES = 10
"""Of every photo for `elsewhere`: N batches through two equally slow stages take N + 1 times of one."""
_TARGET = 0.95
_NOTHING, _ELSEWHERE = "nothing", "elsewhere"
_PREPROCESSING = """preprocessing = { resize = [256], crop = [224], mean = [0.485, 0.456, 0.406], \
std = [0.229, 0.224, 0.225] }
input_shape = [3, 224, 224]
"""


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    with tempfile.TemporaryDirectory() as folder:
        photos, many = Path(folder, "photos"), Path(folder, "many")
        save_photos(photos, effort.of(_PHOTOS))
        link_copies(photos, many, effort.of(_COPIES))
        bulk, long_bulk = (Bulk(source, Path(folder, "out"), effort) for source in (photos, many))
        with served([], config=config(0)) as server, trocar.connect(server.address) as client:
            decode_s = (
                statistics.median(long_bulk.export(client, _NOTHING)[0] for _ in range(3)) / long_bulk.count
            )
        models = ["resnet18=random:0", "resnet50=random:0"]
        with (
            served(models, config=config(decode_s)) as server,
            trocar.connect(server.address, timeout_s=600) as client,
        ):
            rows = [bulk.measure(client, model) for model in ("resnet18", "resnet50")]
            rows.append(long_bulk.measure(client, _ELSEWHERE))
    note = (
        f"Images per second of `trocar extract` over {bulk.count} photos in batches of {_BATCH}, against the "
        "smaller one of decoding alone (the same run with a model that computes nothing) and of the passes "
        "alone. `elsewhere` is a model that waits as long as decoding takes, as one on another device; over "
        f"{long_bulk.count} photos. On the same cores the best that is possible is both after one another, "
        "as the note says."
    )
    return [Table("Bulk", rows, note=note)]


def config(seconds: float) -> str:
    """Return the configuration of a server of two stand-ins; one takes so many seconds for an image."""
    return (
        f'[models.{_NOTHING}]\nfactory = "benchmarks.models:Waiting"\n{_PREPROCESSING}\n'
        f'[models.{_ELSEWHERE}]\nfactory = "benchmarks.models:Waiting"\noptions = {{ seconds = {seconds} }}\n'
        f"{_PREPROCESSING}"
    )


class Bulk:
    """Runs over one folder of photos."""

    def __init__(self, photos: Path, out: Path, effort: Effort) -> None:
        self.count = len(list(photos.iterdir()))
        self._photos = photos
        self._out = out
        self._effort = effort

    def export(self, client: trocar.Client, model: str) -> list[float]:
        """Return the seconds of a run."""
        tap = "avgpool" if model.startswith("resnet") else "/out"
        shutil.rmtree(self._out, ignore_errors=True)
        report = trocar.extract_dataset(client, model, self._photos, [tap], self._out, batch=_BATCH)
        return [report.duration_s]

    def passes(self, client: trocar.Client, model: str) -> list[float]:
        """Return the seconds of the passes alone, on arrays, with nothing beside them."""
        inputs = images(_BATCH)
        tap = "avgpool" if model.startswith("resnet") else "/out"
        count = -(-self.count // _BATCH)
        return [sum(client.extract(model, inputs, [tap]).timing.compute_s for _ in range(count))]

    def measure(self, client: trocar.Client, model: str) -> Row:
        """Compare a run with its stages."""
        ways: dict[str, Callable[[], list[float]]] = {
            "all": partial(self.export, client, model),
            "decoding": partial(self.export, client, _NOTHING),
            "passes": partial(self.passes, client, model),
        }
        result = in_turns(ways, self._effort.of(_ROUNDS))
        rate = {name: self.count / statistics.median(seconds) for name, seconds in result.items()}
        limit = min(rate["decoding"], rate["passes"])
        one_after_another = 1 / (1 / rate["decoding"] + 1 / rate["passes"])
        note = (
            f"{rate['all']:.0f} images/s; decoding {rate['decoding']:.0f}, passes {rate['passes']:.0f}; one "
            f"after the other {one_after_another:.0f}, {one_after_another / limit:.2f} of the limit"
        )
        return row(model, rate["all"] / limit, _TARGET, note, higher_is_better=True)


def save_photos(folder: Path, count: int) -> None:
    """Write parts of scikit-image's and scikit-learn's photos as JPEG files, about as large as ImageNet's."""
    folder.mkdir()
    for index, photo in enumerate(islice(cycle(sample_photos()), count)):
        top, left = (int(side) for side in np.random.default_rng(index).integers(0, 60, 2))
        part = photo.crop((left, top, *photo.size))
        data = io.BytesIO()
        part.save(data, "JPEG", quality=90)
        (folder / f"{index:05}.jpg").write_bytes(data.getvalue())


def link_copies(source: Path, target: Path, count: int) -> None:
    """Make a folder in which every file of another one is so many times."""
    target.mkdir()
    for path in source.iterdir():
        for number in range(count):
            (target / f"{path.stem}-{number}{path.suffix}").hardlink_to(path)


def sample_photos() -> list[Image.Image]:
    """Return colour photos that come with installed packages, at most 640 pixels wide and high."""
    from skimage import data
    from sklearn.datasets import load_sample_images

    arrays: list[Array] = [*load_sample_images().images]
    names = ("astronaut", "chelsea", "coffee", "rocket", "retina")
    arrays += [getattr(data, name)() for name in names]
    photos = [Image.fromarray(array) for array in arrays]
    for photo in photos:
        photo.thumbnail((640, 640))
    return photos
