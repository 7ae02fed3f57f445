"""Callers that store edits and data sets. What was acknowledged is there; other things are whole, or not."""

import random

import trocar
from tests.support.killing.looking import inputs_of
from tests.support.killing.moments import Moments
from tests.support.oracles.tiny_training import samples

_NAMES = ("one", "two", "three", "four")
_MOST_DATASETS = 3


class Editing:
    """Stores, replaces, uses and deletes lists of edits."""

    name = "edits"

    def __init__(self, moments: Moments, seed: int) -> None:
        self._moments, self._chance = moments, random.Random(seed)
        self._stored: dict[str, float] = {}
        self._pending: tuple[str, float | None] | None = None
        self.acknowledged = 0

    def work(self, client: trocar.Client) -> None:
        """Change one list, or use it."""
        name, value = self._chance.choice(_NAMES), round(self._chance.uniform(0.1, 2.0), 3)
        if name not in self._stored or self._chance.random() < 0.4:
            self._pending = name, value
            with self._moments.of("store edits"):
                client.store_edits("plain", name, trocar.edit("conv", "scale", value), replace=True)
            self._stored[name] = value
        elif self._chance.random() < 0.5:
            self._pending = name, None
            with self._moments.of("delete edits"):
                client.delete_edits("plain", name)
            del self._stored[name]
        else:
            self._use(client, name)
            return
        self._pending, self.acknowledged = None, self.acknowledged + 1

    def check(self, client: trocar.Client) -> None:
        """Compare the lists with those that were acknowledged."""
        found = {stored.name for stored in client.stored_edits()}
        if self._pending is not None:
            name, value = self._pending
            self._settle(client, name, value, found)
            self._pending = None
        assert found == set(self._stored), f"edits {sorted(found)}, not {sorted(self._stored)}"
        for name in sorted(found):
            self._use(client, name)

    def _settle(self, client: trocar.Client, name: str, value: float | None, found: set[str]) -> None:
        """Find out whether a change was made that nobody acknowledged."""
        if name not in found:
            assert value is None or name not in self._stored, f"edits {name!r} are gone"
            self._stored.pop(name, None)
        elif value is not None and self._gives(client, name, value):
            self._stored[name] = value

    def _use(self, client: trocar.Client, name: str) -> None:
        assert self._gives(client, name, self._stored[name]), f"edits {name!r} are others"

    def _gives(self, client: trocar.Client, name: str, value: float) -> bool:
        """Whether a list does what the edit does for which it stands."""
        inputs, edit = inputs_of(2, 0), trocar.edit("conv", "scale", value)
        found = client.extract("plain", inputs, "fc", edits=name)["fc"]
        return found.tobytes() == client.extract("plain", inputs, "fc", edits=edit)["fc"].tobytes()


class Uploading:
    """Uploads and deletes data sets."""

    name = "datasets"

    def __init__(self, moments: Moments, seed: int) -> None:
        self._moments, self._chance = moments, random.Random(seed)
        self._stored: dict[str, str] = {}
        """Names by id."""
        self._going: str | None = None
        self._coming: int | None = None
        self._next = 0
        self.acknowledged = 0

    def work(self, client: trocar.Client) -> None:
        """Upload one, or delete one."""
        if len(self._stored) >= _MOST_DATASETS:
            self._going = self._chance.choice(sorted(self._stored))
            with self._moments.of("delete dataset"):
                client.delete_dataset(self._going)
            del self._stored[self._going]
            self._going = None
        else:
            if self._coming is None:
                self._coming, self._next = self._next, self._next + 1
            self._upload(client, self._coming)
        self.acknowledged += 1

    def check(self, client: trocar.Client) -> None:
        """Compare the list with what was acknowledged; go on with what was not."""
        found = {dataset.dataset_id: dataset for dataset in client.datasets()}
        if self._going is not None and self._going not in found:
            del self._stored[self._going]
        self._going = None
        lost = sorted(
            name for key, name in self._stored.items() if key not in found or not found[key].is_complete
        )
        assert not lost, f"data sets {lost} are lost"
        coming = "" if self._coming is None else _name(self._coming)
        others = {dataset.name for key, dataset in found.items() if key not in self._stored}
        assert others <= {coming}, f"nobody uploads {sorted(others - {coming})}"
        if self._coming is not None:
            self._upload(client, self._coming)

    def _upload(self, client: trocar.Client, number: int) -> None:
        images, labels = samples(24 + number % 5, number)
        with self._moments.of("upload"):
            stored = client.upload_dataset(images, targets=labels, name=_name(number), shard_bytes=4096)
        self._stored[stored.dataset_id] = stored.name
        self._coming = None


def _name(number: int) -> str:
    return f"data-{number}"
