"""Imports that take seconds are never on the thread that owns the device, where all calls wait."""

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
import threading
from trocar_server.app.quick_imports import without_dynamo
with without_dynamo():
    from trocar_server.app import app
import torch
import trocar
from tests.support.oracles.tiny_training import MODELS, make_trainer, samples
from tests.support.servers.running_server import running_server
from tests.support.servers.waiting import wait_until
from trocar_server.surgery.recording.symbolic import is_tried

class Threads:
    def find_spec(self, name, path=None, target=None):
        if name in found:
            found[name] = threading.current_thread().name

sizes = ["torch.fx.experimental.validator", "torch.export._trace"] if is_tried(torch.__version__) else []
found = dict.fromkeys(["torch._dynamo", "torchmetrics", "torchvision.transforms.v2", *sizes])
sys.meta_path.insert(0, Threads())
with running_server(models=MODELS, device="cpu") as server, trocar.connect(server.address) as client:
    owner = server.on_owner(threading.current_thread).name
    trainer = make_trainer(client)
    trainer.step(*samples(4))
    assert found["torch._dynamo"] not in (None, owner), found
    trainer.fit(samples(8), epochs=1, batch_size=4)
    assert found["torchmetrics"] is None, "a fit without evaluations has no metrics"
    flip = trocar.training.augmentation("RandomHorizontalFlip", p=0.5)
    trainer.fit(samples(8), epochs=1, batch_size=4, eval_split=0.5, augment=[flip])
    for rows in range(2, 6):
        client.extract("tiny", samples(rows)[0], "/out")
    wait_until(lambda: None not in found.values())
    assert owner not in found.values(), found
"""

RELOAD = """
import json
import sys
import threading
from pathlib import Path
from trocar_server.app.quick_imports import without_dynamo
with without_dynamo():
    from trocar_server.app import app
import trocar
from tests.support.oracles.tiny_training import MODELS
from tests.support.servers.running_server import running_server
from trocar_server.config import ServerConfig

class Threads:
    def find_spec(self, name, path=None, target=None):
        found.setdefault(name, threading.current_thread().name)

bert = Path(sys.argv[1])
sizes = {"hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "intermediate_size": 8}
config = {"architectures": ["BertModel"], "model_type": "bert", "vocab_size": 16, **sizes}
(bert / "config.json").write_text(json.dumps(config))
new = {"bert": {"source": f"hf:{bert}", "weights": "random:0"},
       "vit": {"source": "timm:test_vit", "weights": "random:0"}}
found = {}
sys.meta_path.insert(0, Threads())
with running_server(models=MODELS, device="cpu") as server, trocar.connect(server.address) as client:
    plain = server.app.lifecycle.config.model_dump(exclude_unset=True)
    server.app.lifecycle.reread = lambda: ServerConfig(**{**plain, "models": {**MODELS, **new}})
    client.reload_config()
    assert {"tiny", "bert", "vit"} == {model.model_id for model in client.models()}
    waiting = {server.on_owner(threading.current_thread).name, "server-loop"}
    late = [name for name, thread in found.items() if thread in waiting]
    heavy = {"timm", "transformers", "transformers.modeling_utils", "transformers.models.bert.modeling_bert"}
    assert heavy <= found.keys()
    assert heavy.isdisjoint(late), late
"""


def test_what_new_sizes_trainers_and_fits_need_is_imported_beside_the_device() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=300)


def test_the_library_of_a_model_that_is_added_is_imported_beside_the_device_and_the_calls(
    tmp_path: Path,
) -> None:
    subprocess.run([sys.executable, "-c", RELOAD, str(tmp_path)], check=True, timeout=300)
