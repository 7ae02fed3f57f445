"""The direction store: owners, names, limits, damage."""

from pathlib import Path

import numpy as np
import pytest

from trocar_api.reasons import ErrorReason
from trocar_server.directions import direction_store
from trocar_server.directions.direction import About, Direction, decoded, encoded, encoded_alone
from trocar_server.directions.direction_store import DirectionStore
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import DamagedError


def direction(place: str = "layer1", width: int = 4) -> Direction:
    facts = About("logistic", place, "abc", ["a", "b"], 2.5, [0.5], 10, "accuracy", 0.75, [0.5, 1.0], 0.9)
    return Direction(np.arange(1.0, width + 1)[None], np.array([0.25]), facts)


@pytest.fixture
def store(tmp_path: Path) -> DirectionStore:
    return DirectionStore(tmp_path / "directions", clock=lambda: 12.5)


def reason(call: object) -> ErrorReason:
    with pytest.raises(ServiceError) as error:
        call()  # type: ignore[operator]
    return error.value.reason


def test_directions_come_back_as_they_were(store: DirectionStore, tmp_path: Path) -> None:
    put = [direction("layer1"), direction("layer2", 6)]
    store.put("alice", "vit", "cats", put)
    for reader in (store, DirectionStore(tmp_path / "directions")):
        stored = reader.get("alice", "vit", "cats")
        assert [each.digest for each in stored.directions] == [each.digest for each in put]
        assert [each.about for each in stored.directions] == [each.about for each in put]
        assert (stored.model_id, stored.name, stored.stored_at_s) == ("vit", "cats", 12.5)
    (listed,) = store.entries("alice")
    assert listed.name == "cats"
    assert store.entries("alice", "other") == []


def test_others_neither_see_nor_read_nor_delete_them(store: DirectionStore) -> None:
    store.put("alice", "vit", "cats", [direction()])
    assert store.entries("bob") == []
    assert reason(lambda: store.get("bob", "vit", "cats")) is ErrorReason.UNKNOWN_DIRECTION
    assert reason(lambda: store.delete("bob", "vit", "cats")) is ErrorReason.UNKNOWN_DIRECTION
    with pytest.raises(ServiceError, match="no direction 'cat'; nearest: cats"):
        store.get("alice", "vit", "cat")
    with pytest.raises(ServiceError, match="it is of model 'vit', not of model 'other'"):
        store.get("alice", "other", "cats")


def test_a_name_is_replaced_or_extended_only_when_asked(store: DirectionStore) -> None:
    store.put("alice", "vit", "cats", [direction("layer1"), direction("layer2")])
    assert (
        reason(lambda: store.put("alice", "vit", "cats", [direction("layer3")]))
        is ErrorReason.DIRECTION_EXISTS
    )
    store.put("alice", "vit", "cats", [direction("layer3")], is_adding=True)
    with pytest.raises(ServiceError, match="already exist"):
        store.put("alice", "vit", "cats", [direction("layer1", 8)], is_adding=True)
    store.put("alice", "vit", "cats", [direction("layer1", 8)], is_adding=True, is_replacing=True)
    places = {
        each.about.place: each.vectors.shape[1] for each in store.get("alice", "vit", "cats").directions
    }
    assert places == {"layer1": 8, "layer2": 4, "layer3": 4}
    store.put("alice", "vit", "cats", [direction("layer9")], is_replacing=True)
    assert [each.about.place for each in store.get("alice", "vit", "cats").directions] == ["layer9"]
    store.delete("alice", "vit", "cats")
    assert store.entries("alice") == []


def test_a_principal_has_a_quota(store: DirectionStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put("alice", "vit", "one", [direction()])
    monkeypatch.setattr(direction_store, "MAX_BYTES", 1_500)
    with pytest.raises(ServiceError, match=r"would be .* bytes, the limit is 1,500; delete some"):
        store.put("alice", "vit", "two", [direction(width=100)])
    monkeypatch.setattr(direction_store, "MAX_NAMES", 1)
    with pytest.raises(ServiceError, match="1 names are stored, the maximum"):
        store.put("alice", "vit", "two", [direction()])
    store.put("alice", "vit", "one", [direction()], is_replacing=True)
    with pytest.raises(ServiceError, match="1 to 63 of a-z"):
        store.put("alice", "vit", "../one", [direction()])


@pytest.mark.parametrize("damage", ["cut", "flipped", "emptied", "of another name"])
def test_a_damaged_file_is_told_and_can_be_deleted(
    store: DirectionStore, tmp_path: Path, damage: str
) -> None:
    store.put("alice", "vit", "cats", [direction()])
    (path,) = tmp_path.glob("directions/*/*.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "of another name":
        store.put("alice", "vit", "dogs", [direction()])
        (other,) = (each for each in tmp_path.glob("directions/*/*.safetensors") if each != path)
        content = bytearray(other.read_bytes())
        other.unlink()
    content[-3] ^= damage == "flipped"
    path.write_bytes({"cut": bytes(content[:-9]), "emptied": b""}.get(damage, bytes(content)))
    assert reason(lambda: store.get("alice", "vit", "cats")) is ErrorReason.DIRECTION_CORRUPT
    (listed,) = store.entries("alice")
    assert listed.problem or listed.name == "dogs"
    store.delete("alice", "vit", "cats")


def test_a_file_of_a_caller_is_checked(tmp_path: Path) -> None:
    (alone,) = decoded(encoded_alone(direction()))
    assert alone.digest == direction().digest
    assert [each.digest for each in decoded(encoded([alone, alone]))] == [alone.digest] * 2
    for content in (
        b"",
        b"x" * 40,
        encoded_alone(alone)[:-8],
        encoded_alone(alone).replace(b"logistic", b"fogistic"),
    ):
        with pytest.raises(DamagedError):
            decoded(content)
