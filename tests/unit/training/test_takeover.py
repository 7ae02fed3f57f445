"""Takeover: which server takes the trainers of a lost one, and when."""

import asyncio
from pathlib import Path
from typing import Any, cast

import pytest

from tests.unit.training.stores import SPEC
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_store import TrainerStore
from trocar_server.training.takeover import Takeover

IDS = [f"{number:032x}" for number in range(40)]


class Trainers:
    """Stands for a server's trainers: notes what it takes, and moves the files."""

    def __init__(self, folders: OwnerFolders) -> None:
        self._folders = folders
        self.taken: list[str] = []
        self.asked: list[tuple[str, str]] = []
        self.failures = 0
        self.unmovable: set[str] = set()

    async def drop_moved(self) -> None:
        """There is nothing to drop."""

    async def take_over(self, owner: str, trainer_id: str) -> None:
        self.asked.append((owner, trainer_id))
        if self.failures:
            self.failures -= 1
            raise ServiceError(ErrorReason.STORAGE_UNAVAILABLE, "the disk failed")
        if trainer_id in self.unmovable:
            raise ServiceError(ErrorReason.STORAGE_UNAVAILABLE, f"{trainer_id} cannot be moved")
        if self._folders.take_over(owner, trainer_id):
            self.taken.append(trainer_id)


class Server:
    """One server of the cluster, with a clock of its own."""

    def __init__(self, root: Path, name: str, *trainer_ids: str) -> None:
        self.now = 0.0
        self.name, self.folders = name, OwnerFolders(root, name)
        self.trainers = Trainers(self.folders)
        for trainer_id in trainer_ids:
            TrainerStore(self.folders.own, is_shared=True).create(trainer_id, "alice", SPEC, "m", "")
        trainers = cast("Any", self.trainers)
        self.takeover = Takeover(self.folders, trainers, gone_after_s=2.0, clock=lambda: self.now)

    def look(self, now: float, **servers: bool) -> list[str]:
        """Look at a time, told of these servers; return what it has taken in all."""
        self.now = now
        self.takeover.tell(servers)
        asyncio.run(self.takeover.look())
        return list(self.trainers.taken)


def test_a_server_counts_as_lost_when_it_was_missing_long_enough(tmp_path: Path) -> None:
    Server(tmp_path, "a", *IDS)
    second = Server(tmp_path, "b")
    assert second.look(0.0, a=True, b=True) == []
    assert second.look(9.0, b=True) == []
    assert second.look(10.9, b=True) == []
    assert second.look(10.95, a=True, b=True) == []  # it is back, and counts anew
    assert second.look(12.0, b=True) == []
    assert second.look(13.9, b=True) == []
    assert second.look(14.0, b=True) == IDS
    assert not (tmp_path / "a").exists()


def test_each_trainer_has_one_taker_among_those_that_accept_work(tmp_path: Path) -> None:
    Server(tmp_path, "a", *IDS)
    servers = [Server(tmp_path, name) for name in ("b", "c", "draining")]
    there = {"b": True, "c": True, "draining": False}
    for server in servers:
        server.look(0.0, **there)
    asked = []
    for server in servers:
        server.look(2.0, **there)
        asked.append({trainer_id for _, trainer_id in server.trainers.asked})
    assert asked[0] | asked[1] == set(IDS)
    assert not asked[0] & asked[1]
    assert min(len(asked[0]), len(asked[1])) > 5  # the load is spread
    assert asked[2] == set()


def test_what_the_disk_cut_off_is_tried_again(tmp_path: Path) -> None:
    Server(tmp_path, "a", IDS[0])
    second = Server(tmp_path, "b")
    second.look(0.0, b=True)
    second.trainers.failures = 1
    with pytest.raises(ServiceError):
        second.look(2.0, b=True)
    assert second.look(3.0, b=True) == [IDS[0]]
    assert second.trainers.asked == [("a", IDS[0]), ("b", IDS[0]), ("a", IDS[0])]
    assert second.look(4.0, b=True) == [IDS[0]]
    assert len(second.trainers.asked) == 3


def test_one_that_cannot_be_moved_keeps_no_other(tmp_path: Path) -> None:
    """Neither in the look that meets it, nor in those that try it again first."""
    Server(tmp_path, "a", *IDS[:3])
    second = Server(tmp_path, "c")
    second.trainers.unmovable = {IDS[0], IDS[3]}
    second.look(0.0, c=True)
    for now in (2.0, 3.0):
        with pytest.raises(ServiceError, match=f"{IDS[0]} cannot be moved"):
            second.look(now, c=True)
        assert second.trainers.taken == IDS[1:3]
    Server(tmp_path, "b", *IDS[3:6])
    for now in (4.0, 6.0):
        with pytest.raises(ServiceError, match=f"{IDS[0]} cannot be moved"):
            second.look(now, c=True)
    assert second.trainers.taken == [*IDS[1:3], *IDS[4:6]]


def test_folders_of_lost_servers_go_also_without_a_trainer(tmp_path: Path) -> None:
    """The autoscaler starts and stops replicas all the time, and every look reads every folder."""
    for number in range(3):
        folder = tmp_path / f"stopped-{number}"
        folder.mkdir()
        (folder / "lock").touch()
    deleted = tmp_path / "stopped-0" / "~0123"
    deleted.mkdir()
    (deleted / "trainer.json").touch()
    (tmp_path / "starting").mkdir()
    server = Server(tmp_path, "a")
    server.folders.own.mkdir()
    server.look(0.0, a=True)
    assert len(list(tmp_path.iterdir())) == 5
    server.look(1.0, a=True, starting=True)
    server.look(2.0, a=True, starting=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "starting"]
