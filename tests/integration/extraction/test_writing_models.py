"""Models that write to their own tensors, or keep state: every reply is that of a freshly built model.

The oracle is torch (or transformers) alone, on a module built anew for each call.
"""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

import trocar
from tests.support.models.writing_models import (
    STATEFUL,
    WRITING,
    AddsMuch,
    AddsRarely,
    HalvesRarely,
    NormsOfTheBatch,
    ReadsMuch,
    tensor_bits,
)
from tests.support.oracles.oracle import Array, noise
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import Serve, custom, rebuilt

KINDS = {kind.__name__.lower(): kind for kind in (*WRITING, *STATEFUL)}
ROWS = [noise(3, 4), 50 * noise(3, 4), noise(2, 4), 2 * noise(3, 4), 0 * noise(1, 4) + 60]
"""The second and the last reach the branches that rarely write."""
IN_PLACE = KINDS.keys() - {"replaces", "registers", "addslater", "newparameter"}
"""Those that never run compiled."""
TOKENS = np.arange(8).reshape(2, 4)


class Rwkv(nn.Module):
    """transformers' RWKV, which divides its weights in its first pass in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.RwkvConfig(
            vocab_size=50, context_length=32, hidden_size=16, num_hidden_layers=4, rescale_every=2
        )
        self.model = transformers.RwkvForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens.long()).logits.transpose(1, 2)


class MaxNorm(nn.Module):
    """An embedding that divides the rows that it reads where they are too long."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8, max_norm=0.5)
        self.last = nn.Linear(8, 3)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.last(self.embedding(tokens.long())).mean(1)


class DynamicLlama(nn.Module):
    """transformers' Llama with dynamic RoPE: other frequencies once a text had more than 8 tokens."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=50,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=8,
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        )
        self.model = transformers.LlamaForCausalLM(config)

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.model(tokens.long()).logits


MODELS = {
    **{name: custom(kind, (4,), replicas=3) for name, kind in KINDS.items()},
    "rwkv": custom(Rwkv, (4,), replicas=3),
    "maxnorm": custom(MaxNorm, (4,), replicas=2),
    "llama": custom(DynamicLlama, (4,), replicas=2),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A server on a Unix socket, for prepared calls."""
    host = f"unix:{tmp_path_factory.mktemp('s')}/s"
    engine = {"compile_after": 2, "openvino": False}
    with running_server(models=MODELS, device="cpu", host=host, engine=engine) as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.app.rpc.address, retries=0) as connected:
        yield connected


@pytest.fixture(scope="module", autouse=True)
def _unchanged(server: RunningServer) -> Iterator[None]:
    """After all tests the tensors of every model are as built."""
    yield
    for name in MODELS:
        deployed = server.engine.deployments[name].hosted.module
        assert tensor_bits(deployed) == tensor_bits(rebuilt(KINDS.get(name) or _TEXTS[name])), name


_TEXTS: dict[str, type[nn.Module]] = {"rwkv": Rwkv, "llama": DynamicLlama, "maxnorm": MaxNorm}


def alone(kind: type[nn.Module], rows: Array) -> Array:
    """The output of a freshly built model."""
    with torch.no_grad():
        found: Array = rebuilt(kind)(torch.from_numpy(rows)).numpy()
    return found


def _extracted(client: trocar.Client, name: str, rows: Array) -> Array:
    return client.extract(name, rows, ["/out"])["/out"]


def _streamed(client: trocar.Client, name: str, rows: Array) -> Array:
    with client.extract_stream(name, [noise(2, 4) * 9, rows], ["/out"]) as results:
        maps = [result.maps for result in results][1]
    assert maps is not None
    return maps["/out"]


def _prepared(client: trocar.Client, name: str, rows: Array) -> Array:
    with client.prepare(name, rows, ["/out"]) as prepared:
        prepared(noise(*rows.shape) * 9)
        return prepared(rows)["/out"]


def _swapped(client: trocar.Client, name: str, rows: Array) -> Array:
    """A source pass, on the same inputs, before the pass itself."""
    edits = [trocar.edit("layer", "swap", source="other")]
    return client.extract(name, rows, ["/out"], edits=edits, sources={"other": rows})["/out"]


def _compiled(client: trocar.Client, name: str, rows: Array) -> Array:
    """Exact, but asked as those that may be compiled."""
    maps = client.extract(name, rows, ["/out"], options=trocar.options(numerics="fast"))
    assert maps.execution.numerics == "exact" or name not in IN_PLACE
    return maps["/out"]


def _edited(client: trocar.Client, name: str, rows: Array) -> Array:
    return client.extract(name, rows, ["/out"], edits=[trocar.edit("layer", "scale", 1.0)])["/out"]


WAYS: dict[str, Callable[[trocar.Client, str, Array], Array]] = {
    "extract": _extracted,
    "stream": _streamed,
    "prepared": _prepared,
    "swap": _swapped,
    "compiled": _compiled,
    "edit": _edited,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", KINDS)
def test_each_reply_is_that_of_a_freshly_built_model(client: trocar.Client, name: str, way: str) -> None:
    for rows in ROWS * 2:
        np.testing.assert_allclose(WAYS[way](client, name, rows), alone(KINDS[name], rows), atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_gradients_are_those_of_a_freshly_built_model(client: trocar.Client, name: str) -> None:
    for rows in ROWS * 2:
        given = torch.from_numpy(rows).requires_grad_()
        rebuilt(KINDS[name])(given)[:, 1].sum().backward()
        found = client.gradients(name, rows, of=trocar.logit(1), at=["/in"])["/in"]
        assert given.grad is not None
        np.testing.assert_allclose(found, given.grad.numpy(), atol=2e-5)
        client.extract(name, rows, ["/out"])


@pytest.mark.parametrize("name", KINDS)
def test_a_reply_says_whether_the_model_keeps_state(client: trocar.Client, name: str) -> None:
    maps = client.extract(name, ROWS[0], ["/out"])
    assert maps.execution.stateful == (KINDS[name] in STATEFUL)


@pytest.mark.parametrize("name", KINDS)
def test_a_pass_that_fails_leaves_nothing(client: trocar.Client, name: str) -> None:
    for rows in ROWS:
        bad = trocar.edit("after", "add", np.ones((7, 9), np.float32))
        with pytest.raises(trocar.TrocarError):
            client.extract(name, rows, ["/out"], edits=[bad])
        np.testing.assert_allclose(_extracted(client, name, rows), alone(KINDS[name], rows), atol=2e-5)


@pytest.mark.parametrize("name", KINDS)
def test_a_trainer_changes_nothing_of_its_base(
    server: RunningServer, client: trocar.Client, name: str
) -> None:
    before = tensor_bits(server.engine.deployments[name].hosted.module)
    with client.train(name, trainable=["layer.bias"], optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        for rows in (ROWS[0], ROWS[1], ROWS[0]):
            trainer.step(rows, [0, 1, 2])
            assert tensor_bits(server.engine.deployments[name].hosted.module) == before
            trainer.evaluate(rows, [0, 1, 2])
            client.extract(trainer.trainer_id, rows, ["/out"])
            np.testing.assert_allclose(_extracted(client, name, rows), alone(KINDS[name], rows), atol=2e-5)


def test_a_norm_that_its_author_keeps_in_train_mode_stays_there(client: trocar.Client) -> None:
    rows, labels = ROWS[0], [0, 1, 2]
    trained = rebuilt(NormsOfTheBatch).requires_grad_(False)
    bias = trained.layer.bias.requires_grad_()
    optimizer = torch.optim.SGD([bias], lr=0.1)
    name = NormsOfTheBatch.__name__.lower()
    with client.train(name, trainable=["layer.bias"], optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        for _ in range(3):
            loss = functional.cross_entropy(trained(torch.from_numpy(rows)), torch.tensor(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(rows, labels).loss == pytest.approx(loss.item(), rel=1e-5)
        for _ in range(2):  # the statistics of the trainer's steps are its own, but not those of its calls
            with torch.no_grad():
                expected = copy.deepcopy(trained)(torch.from_numpy(rows)).numpy()
            np.testing.assert_allclose(_extracted(client, trainer.trainer_id, rows), expected, atol=2e-5)


@pytest.mark.parametrize("trainable", ["model.head", "model.rwkv.blocks.1.attention.output"])
def test_rwkv_is_that_of_transformers_before_beside_and_after_training(
    client: trocar.Client, trainable: str
) -> None:
    expected, labels = alone(Rwkv, TOKENS), np.ones((2, 4), np.int64)
    trained = rebuilt(Rwkv).requires_grad_(False)
    parts: Any = trained.get_submodule(trainable).requires_grad_()
    if "blocks" in trainable:  # only then is the part that divides its weights in train mode
        trained.train()
    optimizer = torch.optim.SGD(parts.parameters(), lr=0.1)
    with client.train("rwkv", trainable=[trainable], optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        for _ in range(3):
            loss = functional.cross_entropy(trained(torch.from_numpy(TOKENS)), torch.from_numpy(labels))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(TOKENS, labels).loss == loss.item()
            for _ in range(4):
                assert np.array_equal(_extracted(client, "rwkv", TOKENS), expected)
        fresh = rebuilt(Rwkv)
        fresh.get_submodule(trainable).load_state_dict(parts.state_dict())
        with torch.no_grad():
            tuned = fresh(torch.from_numpy(TOKENS)).numpy()
        for _ in range(3):
            assert np.array_equal(_extracted(client, trainer.trainer_id, TOKENS), tuned)


@pytest.mark.parametrize("trainable", ["last", "embedding"])
def test_an_embedding_with_max_norm_is_that_of_torch(client: trocar.Client, trainable: str) -> None:
    trained = rebuilt(MaxNorm).requires_grad_(False)
    part = trained.get_submodule(trainable).requires_grad_()
    optimizer = torch.optim.SGD(part.parameters(), lr=0.5)
    with client.train("maxnorm", trainable=[trainable], optimizer=trocar.training.sgd(lr=0.5)) as trainer:
        for step in range(3):
            tokens = TOKENS + step
            loss = functional.cross_entropy(trained(torch.from_numpy(tokens)), torch.tensor([0, 1]))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert trainer.step(tokens, [0, 1]).loss == loss.item()
            assert np.array_equal(_extracted(client, "maxnorm", tokens), alone(MaxNorm, tokens))
        with torch.no_grad():
            tuned = copy.deepcopy(trained)(torch.from_numpy(TOKENS)).numpy()
        assert np.array_equal(_extracted(client, trainer.trainer_id, TOKENS), tuned)


@pytest.mark.parametrize("trainable", ["model.head", "model"])
def test_a_published_rwkv_is_the_trainers_model(client: trocar.Client, trainable: str) -> None:
    with client.train("rwkv", trainable=[trainable], optimizer=trocar.training.sgd(lr=0.1)) as trainer:
        for _ in range(2):
            trainer.step(TOKENS, np.ones((2, 4), np.int64))
        shown = _extracted(client, trainer.trainer_id, TOKENS)
        trainer.publish("tuned")
    assert np.array_equal(_extracted(client, "tuned", TOKENS), shown)
    client.unpublish("tuned")


def test_dynamic_rope_forgets_a_longer_text(client: trocar.Client) -> None:
    for count in (4, 20, 4, 12, 20, 9, 4):
        tokens = np.arange(2 * count).reshape(2, count) % 50
        assert np.array_equal(_extracted(client, "llama", tokens), alone(DynamicLlama, tokens))


@pytest.mark.parametrize("kind", [AddsRarely, HalvesRarely])
def test_the_callers_own_model_is_left_alone(kind: type[nn.Module]) -> None:
    module = rebuilt(kind)
    before = tensor_bits(module)
    models: Any = {"own": {"module": module, "input_shape": (4,)}}
    with trocar.connect("local", models=models) as client:
        for rows in ROWS * 2:
            np.testing.assert_allclose(_extracted(client, "own", rows), alone(kind, rows), atol=2e-5)
    assert tensor_bits(module) == before


def test_what_a_pass_gets_copies_of_counts_as_its_memory(serve: Serve) -> None:
    """The buffer that it writes to, and the tensor in an attribute: a mebibyte each."""
    models = {"writes": custom(AddsMuch, (4,)), "reads": custom(ReadsMuch, (4,))}
    server = serve(models=models, limits={"max_pass_bytes": 4 << 20})
    with trocar.connect(server.address) as client:
        needed = {name: client.plan(name, ROWS[0], "after").memory_bytes for name in models}
        assert needed["writes"] == needed["reads"] + (2 << 20)
        client.extract("writes", ROWS[0], "after")
    with trocar.connect(serve(models=models, limits={"max_pass_bytes": 3 << 19}).address) as client:
        client.extract("reads", ROWS[0], "after")
        with pytest.raises(trocar.errors.PassTooLargeError):
            client.extract("writes", ROWS[0], "after")
        with pytest.raises(trocar.errors.PassTooLargeError):
            client.gradients("writes", ROWS[0], of=trocar.value("after"), at="layer")
