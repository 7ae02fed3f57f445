"""Files that earlier versions wrote are still read; their bytes stand here as those versions left them."""

from pathlib import Path

import pytest
import torch

from trocar_server.edit_store import EditStore
from trocar_server.models.weights.weights_file import read_weights
from trocar_server.training.datasets.dataset_store import DatasetStore
from trocar_server.training.datasets.library import DatasetLibrary
from trocar_server.training.files.trainer_storage import TrainingStorage

DATASET_ID, TRAINER_ID = "1" * 32, "2" * 32
OWNER = "2bd806c97f0e00af1a1fc3328fa763a9269723c8db8fac4f93af71db186d6e90"
EDITS = (
    "8c9038777a9c5c17ffc2d2a35b3acdce34789ccdc6aa66081f3649075a2083b8/"
    "97b559ddf7f17a7e4c8895ac1d76f877281f1c924d4b0ab0b6f5a5913e14a6ec"
)
FILES = {
    f"datasets/owners/{OWNER}/{DATASET_ID}.dataset": (
        b'trocar dataset 1 af8840dcabe6f9b99cdc0219e07f3de44b178e7f3bcfbec2ad39a071f7911a2f\n{"principal"'
        b': "alice", "dataset_id": "11111111111111111111111111111111", "stored_at_s": 1234.5, "manifest":'
        b' {"name": "three", "sample_count": 3, "categories": ["a", "b", "c"], "shards": [{"sha256": "529'
        b'3b0545658849f8ba763fa7d69026766e6c1e9e0fdf9abb81f762994005720", "byte_count": 184, "sample_coun'
        b't": 3}]}, "form": {"inputs": {"dtype": "float32", "shape": [2]}, "targets": {"": {"dtype": "int'
        b'64", "shape": [], "low": 0, "high": 2, "labels": [0, 1, 2]}}}}'
    ),
    "datasets/pool/5293b0545658849f8ba763fa7d69026766e6c1e9e0fdf9abb81f762994005720": (
        b'\x80\x00\x00\x00\x00\x00\x00\x00{"targets":{"dtype":"I64","shape":[3],"data_offsets":[0,24]},"i'
        b'nputs":{"dtype":"F32","shape":[3,2],"data_offsets":[24,48]}}     \x00\x00\x00\x00\x00\x00\x00'
        b"\x00\x01\x00\x00\x00\x00\x00\x00\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
        b"\x80?\x00\x00\x00@\x00\x00@@\x00\x00\x80@\x00\x00\xa0@"
    ),
    f"edits/{EDITS}.edits": (
        b'trocar edits 1 9c695e6d75489ef8a69fe341295e062da9f441dd442d1de1b8ad3775b70563da\n{"principal": '
        b'"alice", "model_id": "net", "name": "ablate", "stored_at_s": 1234.5, "description_bytes": 14, "'
        b'tensor_bytes": 9}\nwhat \n it does\x00\xff\n\x00\xff\n\x00\xff\n'
    ),
    "trainers/22222222222222222222222222222222/checkpoint-00000001.json": (
        b'trocar checkpoint 1 16eb16d635fe846ec395dc11d24ac1135149f1742a9799a1f486b8f79c5b34b9\n{"checkpo'
        b'int": {"trainer_id": "22222222222222222222222222222222", "number": 1, "created_at_s": 1234.5, "'
        b'byte_count": 257, "sha256": "0b07dceb2904e3c006fe18c30d2c4bf2daac7ee1e4e42f6f26653708b68a7717",'
        b' "update_count": 2, "note": "n", "is_automatic": false}, "facts": {"count": 2}, "attached": {}}'
    ),
    "trainers/22222222222222222222222222222222/checkpoint-00000001.safetensors": (
        b'\xe8\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{"format":"pt","trocar.same":"{\\"tied\\": \\"a'
        b'\\"}"},"a":{"dtype":"F32","shape":[3],"data_offsets":[0,12]},"c":{"dtype":"BF16","shape":[2],"d'
        b'ata_offsets":[12,16]},"b":{"dtype":"BOOL","shape":[1],"data_offsets":[16,17]}}\x00\x00\x00\x00'
        b"\x00\x00\x80?\x00\x00\x00@\x80?\x00@\x01"
    ),
    "trainers/22222222222222222222222222222222/trainer.json": (
        b'trocar trainer 1 b96101c65dc089902c8ac5979b0e332262d3ae41d3dd5f3172f02a5e4ff97afd\n{"trainer_id'
        b'": "22222222222222222222222222222222", "principal": "alice", "created_at_s": 1234.5, "spec": {"'
        b'lr": 0.5}, "base_model_id": "net", "base_sha256": "abababababababababababababababababababababab'
        b'abababababababababab", "facts": {"fit": null}, "last_number": 0}'
    ),
    "w.safetensors": (
        b'\xb0\x00\x00\x00\x00\x00\x00\x00{"__metadata__":{"format":"pt","trocar.module_versions":"{}"},"'
        b'n":{"dtype":"I64","shape":[1],"data_offsets":[0,8]},"w":{"dtype":"F32","shape":[2],"data_offset'
        b's":[8,16]}}       \x03\x00\x00\x00\x00\x00\x00\x00\x00\x00\x80?\x00\x00\x00@'
    ),
    "w.safetensors.sha256": (
        b"1e72f9405e7edd8b9f5886a1722de993985823365a7272e429a5b4e0e8256a90  w.safetensors\n"
    ),
}
"""Of a data directory, by path: data set, list of edits, trainer with a checkpoint, converted weights."""


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    pooled = next((tmp_path / "datasets" / "pool").iterdir())
    record = next((tmp_path / "datasets" / "owners").glob("*/*.dataset"))
    (record.parent / "shards").mkdir()
    (record.parent / "shards" / pooled.name).hardlink_to(pooled)
    return tmp_path


def test_a_list_of_edits_is_read(data_dir: Path) -> None:
    entry = EditStore(data_dir / "edits").get("alice", "net", "ablate")
    assert (entry.stored_at_s, entry.description) == (1234.5, b"what \n it does")
    assert entry.tensors == b"\x00\xff\n" * 3


def test_a_data_set_is_read(data_dir: Path) -> None:
    store = DatasetStore(data_dir / "datasets", 1 << 20, 1000)
    store.clean()
    info = store.get("alice", DATASET_ID)
    assert (info.name, info.sample_count, info.categories) == ("three", 3, ("a", "b", "c"))
    for shard in store.shards("alice", DATASET_ID):
        shard.check()
    arrays = DatasetLibrary(store, {}, 1000).open("alice", DATASET_ID).arrays((1,))
    assert arrays["inputs"].tolist() == [[2.0, 3.0]]
    assert arrays["targets"].tolist() == [1]


def test_a_trainer_and_its_checkpoint_are_read(data_dir: Path) -> None:
    storage = TrainingStorage(data_dir, keep=3)
    try:
        record = storage.trainers.get(TRAINER_ID)
        saved = storage.checkpoints.load(TRAINER_ID)
    finally:
        storage.close()
    assert (record.principal, record.spec, record.base_model_id) == ("alice", {"lr": 0.5}, "net")
    assert (saved.checkpoint.update_count, saved.checkpoint.note, saved.state.facts) == (2, "n", {"count": 2})
    assert saved.state.tensors["a"].tolist() == [0.0, 1.0, 2.0]
    assert saved.state.tensors["tied"] is saved.state.tensors["a"]
    assert saved.state.tensors["b"].tolist() == [True]
    assert torch.equal(saved.state.tensors["c"], torch.tensor([1, 2], dtype=torch.bfloat16))


def test_weights_are_read(data_dir: Path) -> None:
    state = read_weights(data_dir / "w.safetensors")
    assert {name: tensor.tolist() for name, tensor in state.items()} == {"w": [1.0, 2.0], "n": [3]}
