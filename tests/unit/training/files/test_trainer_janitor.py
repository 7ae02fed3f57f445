"""The janitor removes what is dead, and nothing else."""

from pathlib import Path

import pytest

from tests.unit.training.stores import ID, OTHER_ID, make_state, opened, tree, with_trainer
from trocar_server.training.files.trainer_janitor import clean_published, clean_trainers

HEX = "a" * 32


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"x")
    return path


def test_living_trainers_are_left_alone(tmp_path: Path) -> None:
    with opened(tmp_path) as storage:
        with_trainer(storage)
        storage.checkpoints.save(ID, make_state())
    before = tree(tmp_path)
    assert clean_trainers(tmp_path / "trainers") == 0
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "dead",
    [
        f"{ID}/trainer-{HEX}.partial",
        f"{ID}/checkpoint-00000002-{HEX}.partial",
        f"{ID}/checkpoint-00000002.safetensors",
        f"{OTHER_ID}/trainer-{HEX}.partial",
        f"~{HEX}/trainer.json",
        f"~{HEX}/checkpoint-00000001.json",
    ],
)
def test_what_is_dead_goes(tmp_path: Path, dead: str) -> None:
    put(tmp_path / ID / "trainer.json")
    put(tmp_path / dead)
    (tmp_path / OTHER_ID).mkdir(exist_ok=True)
    assert clean_trainers(tmp_path) >= 2
    assert sorted(path.name for path in tmp_path.rglob("*")) == sorted([ID, "trainer.json"])


@pytest.mark.parametrize(
    "strange",
    [
        "notes.txt",
        "lock",
        f"{ID}x/trainer-{HEX}.partial",
        f"{ID}/notes.txt",
        f"{ID}/x.partial",
        f"{ID}/trainer-{HEX}.partial.bak",
        f"{ID}/checkpoint-1.safetensors",
        f"{ID}/deeper/checkpoint-00000002.safetensors",
        f"{OTHER_ID}/checkpoint-00000001.json",
        f"{OTHER_ID}/notes.txt",
        f"~{HEX}/notes.txt",
        "~backup/trainer.json",
    ],
)
def test_what_is_not_ours_or_only_damaged_stays(tmp_path: Path, strange: str) -> None:
    put(tmp_path / ID / "trainer.json")
    path = put(tmp_path / strange)
    clean_trainers(tmp_path)
    assert path.exists()
    assert (tmp_path / ID / "trainer.json").exists()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = put(tmp_path / "outside" / f"trainer-{HEX}.partial")
    (tmp_path / "trainers").mkdir()
    (tmp_path / "trainers" / ID).symlink_to(outside.parent)
    clean_trainers(tmp_path / "trainers")
    assert outside.exists()


def test_a_published_model_loses_what_its_record_does_not_name(tmp_path: Path) -> None:
    used = put(tmp_path / "flowers" / f"weights-{HEX}.safetensors")
    put(tmp_path / "flowers" / "model.json")
    old = put(tmp_path / "flowers" / f"weights-{'b' * 32}.safetensors")
    partial = put(tmp_path / "flowers" / f"model-{HEX}.partial")
    unborn = put(tmp_path / "birds" / f"weights-{HEX}.safetensors")
    note = put(tmp_path / "flowers" / "README")
    assert clean_published(tmp_path, [("flowers", used.name)]) == 4
    assert used.exists()
    assert note.exists()
    assert not any(path.exists() for path in (old, partial, unborn, unborn.parent))


def test_weights_of_a_damaged_record_stay(tmp_path: Path) -> None:
    put(tmp_path / "flowers" / "model.json")
    weights = put(tmp_path / "flowers" / f"weights-{HEX}.safetensors")
    clean_published(tmp_path, [])
    assert weights.exists()


def test_no_folder_is_nothing_to_do(tmp_path: Path) -> None:
    assert clean_trainers(tmp_path / "no") == clean_published(tmp_path / "no", []) == 0
