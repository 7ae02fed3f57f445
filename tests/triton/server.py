"""The servers that tritonclient is tried on, and what must come from them.

    python -m tests.triton.server FOLDER

Writes inputs and what torch and our own client make of them to FOLDER/expected.npz, then one line: the
address of an open server, that of one that wants tokens, and a token for it. Serves until it is terminated.
"""

import signal
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import structlog
import torch
from transformers import AutoModel, AutoTokenizer

import trocar
from tests.support.models.text_models import save_tokenizer
from tests.support.models.tiny_models import Plain
from tests.support.models.transformers_folders import save_family
from tests.support.oracles.oracle import hooked_outputs, noise, rebuilt_by_name
from tests.support.servers.running_server import running_server
from tests.support.servers.serving import custom, tiny_models_config
from tests.support.wire.pictures import encoded, photo
from trocar_server.auth import Scope, TokenFile

BATCH = noise(4, 3, 64, 64)
TEXTS = ["a cat", "the dog sat on the mat"]


def main(folder: Path) -> None:
    """Serve until SIGTERM."""
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())
    models: dict[str, Any] = {
        **tiny_models_config(),
        "resnet18": {"weights": "random:0"},
        "pictures": custom(Plain, (3, 8, 8), preprocessing={"resize": (8,), "crop": (8,)}),
    }
    plain = {"plain": models["plain"]}
    save_family("bert", folder / "bert")
    save_tokenizer(folder / "bert")
    models["bert"] = {"source": f"hf:{folder / 'bert'}"}
    with TemporaryDirectory() as data_dir, ExitStack() as servers:
        now_s = time.time()
        tokens = TokenFile(Path(data_dir))  # a running server would notice a new one only after a moment
        _, token = tokens.add("alice", [Scope.RUN], expires_at_s=int(now_s) + 3600, now_s=now_s)
        server = servers.enter_context(running_server(models=models, device="cpu"))
        options: dict[str, Any] = {"models": plain, "device": "cpu", "tokens": True, "data_dir": data_dir}
        guarded = servers.enter_context(running_server(**options))
        of_texts = expected_of_texts(folder / "bert")
        np.savez(folder / "expected.npz", **expected(server.address), **of_texts)
        print(server.address, guarded.address, token, flush=True)
        signal.sigwait({signal.SIGTERM})


def expected(address: str) -> dict[str, Any]:
    """Return inputs, what torch computes of them, and what our own client gets, by name."""
    found: dict[str, Any] = {"batch": BATCH, "picture": np.frombuffer(encoded(photo(), "PNG"), np.uint8)}
    of_torch = hooked_outputs(rebuilt_by_name("resnet18"), [BATCH], ["layer1", "layer4", "avgpool"])
    found |= {f"torch {path}": value.numpy() for (path, _, _), value in of_torch.items()}
    with torch.inference_mode():
        found["torch /out"] = rebuilt_by_name("resnet18")(torch.from_numpy(BATCH)).numpy()
    with trocar.connect(address) as client:
        taps = trocar.tap("layer4", stats=["mean", "std", "zero_fraction"])
        maps = client.extract("resnet18", BATCH, taps=[taps])
        found["trocar layer4"] = maps["layer4"]
        for name in ("mean", "std", "zero_fraction"):
            found[f"trocar layer4:{name}"] = np.atleast_1d(getattr(maps.stats["layer4"], name))
        channels = trocar.tap("layer4", stats=["mean"], values=False, over="channel")
        of_channels = client.extract("resnet18", BATCH, taps=[channels]).stats["layer4"]
        found["trocar layer4:mean:channel"] = np.asarray(of_channels.mean)
        found["trocar picture"] = client.extract("pictures", [encoded(photo(), "PNG")], taps="conv")["conv"]
    return found


def expected_of_texts(folder: Path) -> dict[str, Any]:
    """Return the tokens of `TEXTS`, and what transformers computes of them."""
    tokens = dict(AutoTokenizer.from_pretrained(folder)(TEXTS, padding=True, return_tensors="pt"))
    module = AutoModel.from_pretrained(folder).eval().requires_grad_(False)
    with torch.inference_mode():
        states = module(**tokens, output_hidden_states=True).hidden_states
    arrays = {f"bert {name}": value.numpy() for name, value in tokens.items()}
    return {"texts": np.array(TEXTS), "transformers layer": states[1].numpy(), **arrays}


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # its threads, too, so that `sigwait` gets it
    main(Path(sys.argv[1]))
