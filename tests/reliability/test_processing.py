"""Tokenizers and templates that never end are killed while others are served; no code of theirs runs."""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.waiting import wait_until
from trocar import Client
from trocar.errors import DeadlineExceededError, InputRejectedError, ModelInvalidError

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LAYER = "model.encoder.layer.1"
HELLO = [("user", "hello")]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    folders = {
        "plain": text_models.save_tokenizer(tmp_path / "plain"),
        "endless": text_models.save_tokenizer(tmp_path / "endless", chat_template=ENDLESS),
        "coded": text_models.save_tokenizer(tmp_path / "coded"),
    }
    (folders["coded"] / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    config = folders["coded"] / "tokenizer_config.json"
    named = {"auto_map": {"AutoTokenizer": ["evil.Tokenizer", "evil.Tokenizer"]}}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"nested": named}))
    models: dict[str, Any] = {
        model_id: {"factory": f"{text_models.__name__}:bert", "input_shape": (4,), "processor": folder}
        for model_id, folder in folders.items()
    }
    with running_server(models=models, limits={"max_processing_s": 15}) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[Client]:
    with trocar.connect(server.address) as found:
        yield found


def test_a_deadline_kills_an_endless_template(server: RunningServer, client: Client) -> None:
    client.extract("plain", "the cat", [LAYER])
    (pid,) = server.engine.preparation.processor.pids
    with pytest.raises(DeadlineExceededError):
        client.extract("endless", trocar.chat(HELLO), [LAYER], options=trocar.options(timeout_s=3))
    wait_until(lambda: not Path(f"/proc/{pid}").exists())
    maps = client.extract("plain", "the cat", [LAYER])
    assert pid not in server.engine.preparation.processor.pids
    assert maps.tokens.lengths == (4,)


def test_the_limit_on_seconds_ends_it_too(client: Client) -> None:
    with pytest.raises(InputRejectedError, match="takes longer than 15 s over these inputs"):
        client.extract("endless", trocar.chat(HELLO), [LAYER], options=trocar.options(timeout_s=120))


def test_others_are_served_meanwhile(server: RunningServer, client: Client) -> None:
    with ThreadPoolExecutor(1) as threads:
        endless = threads.submit(
            client.extract, "endless", trocar.chat(HELLO), [LAYER], options=trocar.options(timeout_s=120)
        )
        wait_until(lambda: bool(server.engine.preparation.processor.pids))
        with trocar.connect(server.address) as other:
            assert np.isfinite(other.extract("plain", "a dog", [LAYER])[LAYER]).all()
        assert not endless.done()
        assert isinstance(endless.exception(), InputRejectedError)


def test_a_stop_leaves_no_process(tmp_path: Path) -> None:
    folder = text_models.save_tokenizer(tmp_path)
    model = {"factory": f"{text_models.__name__}:bert", "input_shape": (4,), "processor": folder}
    with running_server(models={"bert": model}) as server:
        with trocar.connect(server.address) as client:
            client.extract("bert", "the cat", [LAYER])
        pids = server.engine.preparation.processor.pids
        assert pids
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


def test_code_of_a_processor_is_never_run(client: Client, tmp_path: Path) -> None:
    with pytest.raises(ModelInvalidError, match="has an auto_map"):
        client.extract("coded", "the cat", [LAYER])
    assert not (tmp_path / "ran").exists()
