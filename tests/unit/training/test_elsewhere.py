"""Trainers of other servers: calls for them are refused, and they count."""

from pathlib import Path

import pytest

from tests.unit.training.stores import SPEC
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.elsewhere import Elsewhere
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_store import TrainerStore

IDS = [f"{number:032x}" for number in range(3)]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[OwnerFolders, OwnerFolders]:
    """Folders of two servers; the first has a trainer."""
    first, second = (OwnerFolders(tmp_path, name) for name in "ab")
    TrainerStore(first.own, is_shared=True).create(IDS[0], "alice", SPEC, "m", "")
    return first, second


async def test_a_call_for_a_trainer_of_another_server_is_sent_there(
    folders: tuple[OwnerFolders, OwnerFolders],
) -> None:
    first, second = map(Elsewhere, folders)
    assert await first.is_here(IDS[0])
    assert not await second.is_here(IDS[1])  # nobody has it: the usual error follows
    with pytest.raises(ServiceError, match="at another replica") as error:
        await second.is_here(IDS[0])
    assert error.value.reason is ErrorReason.UNKNOWN_TRAINER


async def test_trainers_of_other_servers_count_and_a_request_is_known_everywhere(
    folders: tuple[OwnerFolders, OwnerFolders],
) -> None:
    store = TrainerStore(folders[0].own, is_shared=True)
    store.create(IDS[1], "alice", SPEC, "m", "", {"request_id": "r-1"})
    store.create(IDS[2], "bob", SPEC, "m", "", {"request_id": "r-2"})
    first, second = map(Elsewhere, folders)
    assert await second.count("alice", "") == 2
    assert await second.count("alice", "r-2") == 2  # another caller's request
    assert await first.count("alice", "r-1") == 0
    with pytest.raises(ServiceError, match="at another replica"):
        await second.count("alice", "r-1")
