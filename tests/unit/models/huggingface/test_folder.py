"""Model folders: refused before transformers is imported where they bring code, an adapter or pickles."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import warm_python
from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.models.huggingface.folder import check_weights, open_folder

AUTO_MAP = {"AutoModel": "evil.Evil", "AutoConfig": "evil.Evil", "AutoTokenizer": ["evil.Evil", None]}
PLACES: dict[str, Any] = {
    "config.json": {"auto_map": AUTO_MAP},
    "config.json of text": {"text_config": {"auto_map": AUTO_MAP}},
    "config.json of vision": {"vision_config": {"backbone": [{"auto_map": AUTO_MAP}]}},
    "tokenizer_config.json": {"auto_map": AUTO_MAP},
    "preprocessor_config.json": {"auto_map": AUTO_MAP},
    "processor_config.json": {"feature_extractor": {"auto_map": AUTO_MAP}},
    "speech/config.json": {"auto_map": AUTO_MAP},
}
WATCHED = """
import sys
from pathlib import Path
import torch
folder, seen = sys.argv[1], []
def watch(event, args):
    text = " ".join(str(getattr(arg, "co_filename", arg)) for arg in args)
    if event in ("import", "exec", "compile", "open") and "evil" in text:
        seen.append((event, text))
sys.addaudithook(watch)
sys.path.append("/nowhere")
from trocar_server.errors import ServiceError
from trocar_server.models import load_model, parse_model_argument
try:
    load_model(parse_model_argument(f"m=hf:{folder}=random:0"), torch.device("cpu"), Path(folder) / "cache")
except ServiceError as error:
    print(error.reason, "auto_map" in error.message, "transformers" in sys.modules, seen)
"""


def _write(folder: Path, name: str, value: Any) -> None:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def _config(folder: Path, **entries: Any) -> Path:
    _write(folder, "config.json", {"model_type": "bert", "architectures": ["BertModel"], **entries})
    return folder


@pytest.mark.parametrize("place", PLACES)
def test_an_auto_map_anywhere_is_refused(tmp_path: Path, place: str) -> None:
    _config(tmp_path)
    name = place.partition(" ")[0]
    _write(tmp_path, name, {"model_type": "bert", **PLACES[place]})
    with pytest.raises(ServiceError, match="auto_map") as error:
        open_folder(tmp_path)
    assert error.value.reason is ErrorReason.MODEL_INVALID


@pytest.mark.parametrize("place", ["config.json of text", "tokenizer_config.json"])
def test_no_file_of_a_refused_folder_is_imported_or_executed(tmp_path: Path, place: str) -> None:
    _config(tmp_path)
    (tmp_path / "evil.py").write_text("raise SystemExit('executed')")
    _write(tmp_path, place.partition(" ")[0], {"model_type": "bert", **PLACES[place]})
    done = warm_python.run(
        [sys.executable, "-c", WATCHED, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    assert done.stdout.strip() == "MODEL_INVALID True False []"


def test_a_token_may_be_called_auto_map(tmp_path: Path) -> None:
    _config(tmp_path)
    _write(tmp_path, "vocab.json", {"auto_map": 7})
    assert open_folder(tmp_path).config["model_type"] == "bert"


@pytest.mark.parametrize("key", ["_attn_implementation", "attn_implementation", "experts_implementation"])
def test_kernels_of_the_hub_are_refused(tmp_path: Path, key: str) -> None:
    with pytest.raises(ServiceError, match="kernels of the Hub"):
        open_folder(_config(tmp_path, text_config={key: "kernels-community/flash-attn3"}))


def test_quantized_weights_and_adapters_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ServiceError, match="quantized"):
        open_folder(_config(tmp_path / "quantized", quantization_config={"quant_method": "fp8"}))
    adapter = _config(tmp_path / "adapter")
    _write(adapter, "adapter_config.json", {"base_model_name_or_path": "org/base"})
    with pytest.raises(ServiceError, match="merge_and_unload"):
        open_folder(adapter)


def test_pickles_are_refused_with_the_cure(tmp_path: Path) -> None:
    folder = _config(tmp_path)
    (folder / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ServiceError, match=r"trocar admin convert pytorch_model.bin model.safetensors"):
        check_weights(open_folder(folder))


@pytest.mark.parametrize(
    ("files", "advice"),
    [
        (("optimizer.pt", "pytorch_model.bin", "scheduler.pt"), "admin convert pytorch_model.bin model"),
        (("model.pt", "optimizer.pt", "training_args.bin"), "trocar admin convert model.pt model"),
        (
            ("optimizer.pt", *(f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))),
            r"save_pretrained\(FOLDER\)",
        ),
        (("optimizer.pt", "scheduler.pt", "training_args.bin"), "has no weights; add model.safetensors"),
    ],
)
def test_the_advice_is_for_the_file_with_the_weights(
    tmp_path: Path, files: tuple[str, ...], advice: str
) -> None:
    folder = _config(tmp_path)
    for name in files:
        (folder / name).write_bytes(b"")
    with pytest.raises(ServiceError, match=advice) as error:
        check_weights(open_folder(folder))
    assert "optimizer" not in error.value.message


def test_a_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = _config(tmp_path / "model")
    _write(folder, "modules.json", [{"path": "../other", "type": "sentence_transformers.models.Transformer"}])
    with pytest.raises(ServiceError, match="names a path outside of the folder"):
        open_folder(folder)
