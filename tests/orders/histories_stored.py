"""Histories of stored edits and of uploads; their model is `Registers`, with shards that must be there."""

# pyright: reportArgumentType=false

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.orders import stored_calls
from tests.orders.history import LEFT, History, Registers
from tests.orders.world import look
from trocar_api.v1 import dataset_pb2, edit_pb2, edit_store_pb2

if TYPE_CHECKING:
    from tests.orders.world import State
    from tests.support.orders.doorway import Call

NAMES = ("one", "two")


class Edits(History):
    """Edits that are stored, replaced and deleted under two names."""

    settings: ClassVar[dict[str, Any]] = stored_calls.SETTINGS

    def prepare(self) -> None:
        self.model = Registers()

    @rule(name=st.sampled_from(NAMES), low=st.integers(0, 3), is_replacing=st.booleans())
    def store(self, name: str, low: int, is_replacing: bool) -> None:
        message = stored_calls.store(name, float(low), is_replacing=is_replacing)
        self.call((name, float(low)), stored_calls.STORE, message)

    @rule(name=st.sampled_from(NAMES))
    def delete(self, name: str) -> None:
        message = edit_store_pb2.DeleteEditsRequest(model_id="plain", name=name)
        self.call((name, None), "EditStoreService/DeleteEdits", message)

    def answered(self, what: tuple[str, float | None], call: Call) -> None:
        assert call.answer.code in ("OK", *LEFT, "ALREADY_EXISTS", "NOT_FOUND"), call.answer
        self.model.note(*what, call.answer.code)

    def rested(self) -> None:
        stored = self.run(look(self.server))["edits"]
        lows = {name: edit_pb2.Edit.FromString(message).clamp.low for _, name, message in stored}
        for name in NAMES:
            self.model.see(name, lows.get(name))

    def stored(self) -> State:
        return {"edits": self.run(look(self.server))["edits"]}


SHARDS = tuple(stored_calls.shard(seed) for seed in range(3))
DATASETS = {"a": (0,), "b": (0, 1), "c": (2, 1)}
"""The shards of each data set: some are in two."""
BEGUN, COMPLETE = False, True
NOBODY = "0" * 32


class Uploads(History):
    """Data sets that are uploaded shard by shard, committed and deleted, some with equal shards."""

    settings: ClassVar[dict[str, Any]] = stored_calls.SETTINGS

    def prepare(self) -> None:
        self.model = Registers()
        self.ids: dict[str, str] = {}

    @rule(name=st.sampled_from(sorted(DATASETS)))
    def begin_upload(self, name: str) -> None:
        message = stored_calls.manifest(name, *(SHARDS[number] for number in DATASETS[name]))
        self.call((name, BEGUN), "DatasetService/BeginUpload", message)

    @rule(name=st.sampled_from(sorted(DATASETS)), which=st.integers(0, 1))
    def send(self, name: str, which: int) -> None:
        numbers = DATASETS[name]
        data = SHARDS[numbers[which % len(numbers)]]
        messages = stored_calls.parts(self.ids.get(name, NOBODY), data)
        self.call(None, "DatasetService/UploadShard", *messages)

    @rule(name=st.sampled_from(sorted(DATASETS)))
    def commit(self, name: str) -> None:
        message = dataset_pb2.CommitUploadRequest(dataset_id=self.ids.get(name, NOBODY))
        self.call((name, COMPLETE), "DatasetService/CommitUpload", message)

    @rule(name=st.sampled_from(sorted(DATASETS)))
    def delete(self, name: str) -> None:
        message = dataset_pb2.DeleteDatasetRequest(dataset_id=self.ids.get(name, NOBODY))
        self.call((name, None), "DatasetService/DeleteDataset", message)

    @rule(name=st.sampled_from(sorted(DATASETS)))
    def upload(self, name: str) -> None:
        """Upload it without others beside: it is complete then."""
        self.rest()
        self.begin_upload(name)
        self.rest()
        for number in range(len(DATASETS[name])):
            self.send(name, number)
            self.rest()
        self.commit(name)
        self.rest()
        assert self.model.values[name] is COMPLETE

    def answered(self, what: tuple[str, bool | None] | None, call: Call) -> None:
        answer, refusals = call.answer, ("NOT_FOUND", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED")
        assert answer.code in ("OK", *LEFT, *refusals), answer  # four shards may be on their way
        if what is None:
            return
        name, value = what
        if value is BEGUN and COMPLETE in self.model.may_be(name):
            self.model.note(name, COMPLETE, "GONE")  # it is only found
        self.model.note(name, value, "GONE" if value is BEGUN else answer.code)

    def rested(self) -> None:
        listing = self.ask("DatasetService/ListDatasets", dataset_pb2.ListDatasetsRequest())
        told = dataset_pb2.ListDatasetsResponse.FromString(listing.replies[0]).datasets
        self.ids = {one.name: one.dataset_id for one in told}
        assert len(self.ids) == len(told)
        complete = {one.name: one.is_complete for one in told}
        folder = self.server.app.lifecycle.data_dir / "datasets"
        files = {path.name: path for path in folder.glob("owners/*/shards/*")}
        for name, numbers in DATASETS.items():
            self.model.see(name, complete.get(name))
            for number in numbers if complete.get(name) else ():
                data = SHARDS[number]
                path = files.get(stored_calls.sha256(data))
                assert path is not None
                assert path.read_bytes() == data
        assert not [path for path in folder.glob("incoming/*") if path.is_file()]

    def stored(self) -> State:
        return {name: self.run(look(self.server))[name] for name in ("datasets", "shards")}
