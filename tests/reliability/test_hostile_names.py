"""Names that are none, and names of what belongs to others, wherever a request can have one.

Every method of every service, from the descriptors: none answers with a defect, none touches a file outside
its own folder, and no error says what its caller may not know.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import grpc
import pytest

import trocar
from tests.support.models.tiny_models import Plain
from tests.support.oracles.tiny_training import MODELS, make_trainer, samples
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom
from tests.support.wire.methods import OWN, Method
from tests.support.wire.provoked import outcome, request_of, requests_with
from tests.support.wire.wire import raw_channel

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BAD_NAMES = [
    *("..", ".", "/", "\\", "", " ", "~", "-", "_", "con", "nul", "a/", "/a", "a//b", "./a", "a/../../b"),
    *("../../etc/passwd", "/etc/passwd", "~root/x", "..\\..\\x", "%2e%2e%2f", "..%00", "file:///etc"),
    *("A", "a b", "a\tb", "a\nb", "a\0b", "\0", "\x7f", "a\r\nb", ".hidden", "a" * 64, "a" * 300, "a" * 5000),
    *("\u00e9", "\uff41", "\u202eabc", "\U0001f4a3", "a\u0301", "\ufeff", "\u0430", "\u0131", "\u00df"),
    *("*", "?", "[a-z]", "{a,b}", "$(id)", "`id`", ";ls", "|ls", "&&ls", "$HOME", "%s%n", "{0}", "<a>"),
    *("'", '"', "null", "None", "true", "-1", "0x0", "1e309"),
]
DEFECTS = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DEADLINE_EXCEEDED}
ALICE, BOB = "alice-who-must-not-be-named", "bob"


@dataclass(frozen=True)
class World:
    """A server with something of Alice's, and what nobody else may be told."""

    server: RunningServer
    folder: Path
    ids: list[str]
    secrets: list[str]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    models = {**MODELS, "plain": custom(Plain, (3, 8, 8))}
    with (
        running_server(models=models, device="cpu", data_dir=folder / "data") as server,
        trocar.connect(server.address, token=ALICE) as alice,
    ):
        trainer = make_trainer(alice)
        trainer.save(note="alices-note")
        dataset = alice.upload_dataset(samples(4)[0], targets=samples(4)[1], name="alices-pictures")
        alice.store_edits("plain", "alices-edits", trocar.edit("conv", "zero"))
        ids = [trainer.trainer_id, dataset.dataset_id, "alices-edits"]
        secrets = [ALICE, "alices-note", "alices-pictures", str(folder)]
        secrets += ["site-packages", "Traceback", 'File "', ".py"]
        yield World(server, folder, ids, secrets)


@pytest.fixture
def channel(world: World) -> Iterator[grpc.Channel]:
    with raw_channel(world.server.address) as opened:
        yield opened


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*")}


every_method = pytest.mark.parametrize("method", OWN, ids=lambda method: method.path)


@every_method
def test_a_bad_name_is_answered_with_a_reason_wherever_it_stands(
    world: World, channel: grpc.Channel, method: Method
) -> None:
    before = files(world.folder)
    for name in BAD_NAMES:
        for message in requests_with(method, name):
            code, said = outcome(method, channel, message, metadata=[("authorization", f"Bearer {BOB}")])
            assert code not in DEFECTS, (name, message, said)
            assert not any(secret in said for secret in world.secrets), (name, said)
    assert {path for path in files(world.folder) - before if not path.startswith("data/")} == set()


@every_method
def test_what_belongs_to_another_reads_as_if_it_were_not_there(
    world: World, channel: grpc.Channel, method: Method
) -> None:
    """The same words for what is Alice's and for what nobody has, whoever else asks."""
    metadata = [("authorization", f"Bearer {BOB}")]
    for known in world.ids:
        absent = known[::-1] if known[::-1] != known else "f" * len(known)
        for theirs, nobodys in zip(requests_with(method, known), requests_with(method, absent), strict=True):
            first = outcome(method, channel, theirs, metadata=metadata)
            second = outcome(method, channel, nobodys, metadata=metadata)
            assert first[0] == second[0], (theirs, first, second)
            assert not any(secret in first[1] for secret in world.secrets)


def test_alice_still_has_everything(world: World) -> None:
    with trocar.connect(world.server.address, token=ALICE) as alice:
        trainer = alice.trainer(world.ids[0])
        assert [checkpoint.note for checkpoint in trainer.checkpoints()] == ["alices-note"]
        assert [dataset.name for dataset in alice.datasets()] == ["alices-pictures"]
        assert [stored.name for stored in alice.stored_edits()] == ["alices-edits"]


def test_there_are_requests_to_provoke_hundreds_of_errors_with() -> None:
    """So that this file does not pass because it asks nothing."""
    provoked: list[Any] = [m for method in OWN for m in requests_with(method, "x")]
    assert len(provoked) * len(BAD_NAMES) > 200
    assert any(request_of(method).ByteSize() == 0 for method in OWN)
    assert len(BAD_NAMES) >= 60
