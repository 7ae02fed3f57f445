"""Edits that the server keeps under a name."""

from datetime import UTC, datetime
from typing import Any

import grpc
import numpy as np
import pytest

import trocar
from tests.unit.client.fake_server import FakeServer
from trocar._request.stored.stored_edits import store_request, stored_edits
from trocar_api.v1 import edit_store_pb2 as pb
from trocar_api.v1.edit_pb2 import ZeroEdit

ZERO = trocar.edit("layer3", "zero", channels=3)
STORED = trocar.StoredEdits(
    model_id="resnet18",
    name="ablate-3",
    edits=("edit('layer3', 'scale', 0.0)",),
    byte_count=2048,
    stored_at=datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC),
)


def test_edits_are_stored_with_their_arrays(client: trocar.Client, server: FakeServer) -> None:
    arrays: list[np.ndarray[Any, Any]] = [np.arange(3, dtype=np.float32), np.ones(2)]
    edits = [ZERO, *(trocar.edit("x", "add", array) for array in arrays)]
    assert client.store_edits("resnet18", "ablate-3", edits, replace=True) == STORED
    ((name, request),) = server.calls
    assert name == "StoreEdits"
    assert (request.model_id, request.name, request.is_replacing) == ("resnet18", "ablate-3", True)
    assert list(request.edits) == [edit.to_wire() for edit in edits]
    assert [(chunk.payload_index, chunk.offset_bytes, chunk.data) for chunk in request.chunks] == [
        (position, 0, array.tobytes()) for position, array in enumerate(arrays)
    ]


def test_nothing_is_replaced_unless_it_is_said() -> None:
    assert not store_request("resnet18", "a", ZERO, replace=False).is_replacing


@pytest.mark.parametrize("model_id", [None, "resnet18"])
def test_stored_edits_are_listed(client: trocar.Client, server: FakeServer, model_id: str | None) -> None:
    assert client.stored_edits(model_id) == [STORED]
    assert server.calls == [("ListEdits", pb.ListEditsRequest(model_id=model_id or ""))]


def test_stored_edits_are_deleted(client: trocar.Client, server: FakeServer) -> None:
    client.delete_edits("resnet18", "ablate-3")
    assert server.calls == [("DeleteEdits", pb.DeleteEditsRequest(model_id="resnet18", name="ablate-3"))]


def test_a_name_that_is_taken_is_an_error_of_its_own(client: trocar.Client, server: FakeServer) -> None:
    server.fail(grpc.StatusCode.ALREADY_EXISTS, "there are edits 'ablate-3' already", "EDITS_EXIST")
    with pytest.raises(trocar.errors.EditsExistError, match="already"):
        client.store_edits("resnet18", "ablate-3", ZERO)


@pytest.mark.parametrize(
    ("name", "edits", "error", "match"),
    [
        ("ok", [], ValueError, "no edits to store"),
        ("ok", "other", TypeError, "cannot be names of stored edits"),
        ("ok", [ZERO, "other"], TypeError, "cannot be names of stored edits"),
        ("ok", [{"at": "x"}], TypeError, "created with trocar.edit"),
        ("", ZERO, ValueError, "cannot be the name"),
        ("Big", ZERO, ValueError, "cannot be the name"),
        ("-a", ZERO, ValueError, "cannot be the name"),
        ("a\n", ZERO, ValueError, "cannot be the name"),
        ("a" * 64, ZERO, ValueError, "63 at most"),
    ],
)
def test_what_cannot_be_stored_is_refused_before_it_is_sent(
    client: trocar.Client, server: FakeServer, name: str, edits: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        client.store_edits("resnet18", name, edits)
    assert not server.calls


def test_they_print_as_a_list() -> None:
    assert str(STORED) == (
        "ablate-3  resnet18, stored 1970-01-01 00:00:01 UTC, 2,048 bytes of arrays\n"
        "  edit('layer3', 'scale', 0.0)"
    )


def test_edits_of_another_version_show_as_such() -> None:
    message = pb.StoredEdits(name="a")
    message.edits.add(selector="x")
    message.edits.add(stored="b")
    message.edits.add(zero=ZeroEdit()).parts.path = "y"
    assert stored_edits(message).edits == (
        "edit('x', an operation that this client does not know)",
        "'b'",
        "edit('y', 'zero')",
    )


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), 1e300])
def test_an_impossible_time_is_a_bad_reply(seconds: float) -> None:
    with pytest.raises(trocar.BadReplyError, match="after 1970"):
        stored_edits(pb.StoredEdits(name="a", stored_at_s=seconds))
