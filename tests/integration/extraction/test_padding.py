"""Padding: statistics, pools and covariance of a padded batch are those of each sample alone."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers

import trocar
from tests.support.models import text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar import Client

MODELS = text_models.__name__
TEXTS = ["the cat sat", "a dog sat on the mat", "hello"]
LAYER = "model.encoder.layer.1"
GPT_LAYER = "model.h.1"


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    folder = text_models.save_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    left = text_models.save_tokenizer(tmp_path_factory.mktemp("left"), padding_side="left")

    def custom(name: str, processor: Path) -> dict[str, Any]:
        return {"factory": f"{MODELS}:{name}", "input_shape": (4,), "processor": processor}

    models = {"bert": custom("bert", folder), "gpt": custom("gpt", left)}
    with running_server(models=models) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[Client]:
    with trocar.connect(server.address) as found:
        yield found


def alone(client: Client) -> list[np.ndarray]:
    return [client.extract("bert", text, [LAYER])[LAYER][0] for text in TEXTS]


def test_statistics_over_samples_are_those_of_each_text_alone(client: Client) -> None:
    names: list[Any] = ["mean", "std", "min", "max", "l2", "count", "kurtosis", "quantiles"]
    tap = trocar.tap(LAYER, stats=names, over="sample", values=False)
    found = client.extract("bert", TEXTS, [tap]).stats[LAYER]
    own = alone(client)
    np.testing.assert_array_equal(found.count, [value.size for value in own])
    for name in ("mean", "std", "min", "max"):
        expected = [getattr(value.astype(np.float64), name)() for value in own]
        close(getattr(found, name), expected)
    close(found.l2, [np.linalg.norm(value) for value in own])
    shares = [np.quantile(value, [0, 0.25, 0.5, 0.75, 1]) for value in own]
    close(found.quantiles, shares)


def test_statistics_over_channels_and_covariance_are_those_of_all_tokens(client: Client) -> None:
    tap = trocar.tap(LAYER, stats=["mean", "var", "covariance"], over="channel", values=False)
    found = client.extract("bert", TEXTS, [tap]).stats[LAYER]
    tokens = np.concatenate(alone(client)).astype(np.float64)
    close(found.mean, tokens.mean(0))
    close(found.var, tokens.var(0))
    close(found.covariance, np.cov(tokens.T, bias=True))


def test_a_stream_counts_no_padding(client: Client) -> None:
    tap = trocar.tap(LAYER, stats=["mean", "count"], over="channel", values=False)
    with client.extract_stream("bert", [TEXTS[:2], TEXTS[1:]], [tap], running_statistics=True) as stream:
        assert len(list(stream)) == 2
    values = alone(client)
    tokens = np.concatenate([values[0], values[1], values[1], values[2]]).astype(np.float64)
    close(stream.statistics[LAYER].mean, tokens.mean(0))
    np.testing.assert_array_equal(stream.statistics[LAYER].count, len(tokens))


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("avg", lambda value: value.mean(0)),
        ("max", lambda value: value.max(0)),
        ("gem", lambda value: (np.maximum(value, 1e-6) ** 3).mean(0) ** (1 / 3)),
        ("cls", lambda value: value[0]),
        ("last", lambda value: value[-1]),
    ],
)
def test_pools_are_those_of_each_text_alone(client: Client, kind: Any, of: Any) -> None:
    found = client.extract("bert", TEXTS, [trocar.tap(LAYER, reduce=trocar.pool(kind))])[LAYER]
    close(found, [of(value) for value in alone(client)])


@pytest.mark.parametrize("kind", ["avg", "max", "gem"])
def test_pools_to_a_size_are_those_of_each_text_alone(client: Client, kind: Any) -> None:
    pool = trocar.pool(kind, 2)
    tap = trocar.tap(LAYER, reduce=pool, stats=["mean", "count"], over="sample")
    maps = client.extract("bert", TEXTS, [tap])
    own = [client.extract("bert", text, [trocar.tap(LAYER, reduce=pool)])[LAYER][0] for text in TEXTS]
    close(maps[LAYER], own)
    close(maps.stats[LAYER].mean, [value.mean() for value in own])
    np.testing.assert_array_equal(maps.stats[LAYER].count, [2 * 16] * 3)


@pytest.mark.parametrize("over", ["all", "sample"])
def test_statistics_of_one_channel_by_an_integer_are_those_of_its_own_tokens(
    client: Client, over: Any
) -> None:
    taps = [
        trocar.tap(LAYER, alias="integer", index=np.s_[:, :, 5], stats=["mean", "count"], over=over),
        trocar.tap(LAYER, alias="channel", channels=[5], stats=["mean", "count"], over=over),
    ]
    stats = client.extract("bert", TEXTS, taps).stats
    np.testing.assert_array_equal(stats["integer"].mean, stats["channel"].mean)
    np.testing.assert_array_equal(stats["integer"].count, stats["channel"].count)
    assert np.sum(stats["integer"].count) == sum(map(len, alone(client)))


def test_statistics_of_one_sample_or_token_by_an_integer_are_those_of_own_tokens(client: Client) -> None:
    taps = [
        trocar.tap(LAYER, alias="sample", index=0, stats="mean", over="channel"),
        trocar.tap(LAYER, alias="token", index=np.s_[:, 5], stats=["count", "argmax_channel"], over="sample"),
        trocar.tap(LAYER, alias="tokens", tokens=[5], stats=["count", "argmax_channel"], over="sample"),
    ]
    stats = client.extract("bert", TEXTS, taps).stats
    own = alone(client)
    close(stats["sample"].mean, own[0].mean(0))
    np.testing.assert_array_equal(stats["token"].count, [16 * (len(value) > 5) for value in own])
    np.testing.assert_array_equal(stats["token"].argmax_channel, stats["tokens"].argmax_channel)


@pytest.mark.parametrize("smallest", [False, True])
def test_the_top_tokens_are_those_of_each_text_alone(client: Client, smallest: bool) -> None:
    tap = trocar.tap(LAYER, reduce=trocar.top_k(4, dim=1, smallest=smallest), stats="count", over="sample")
    maps = client.extract("bert", TEXTS, [tap])
    values = client.extract("bert", TEXTS, [LAYER])[LAYER]
    for sample, own in enumerate(alone(client)):
        count = min(4, len(own))  # "hello" has 3 tokens
        ordered = np.sort(own, 0)
        close(maps[LAYER][sample, :count], ordered[:count] if smallest else ordered[::-1][:count])
        places = maps[f"{LAYER}.indices"][sample]
        found = np.take_along_axis(values[sample], places[:count], 0)
        np.testing.assert_array_equal(found, maps[LAYER][sample, :count])
        assert (places[count:] == -1).all()
        assert not maps[LAYER][sample, count:].any()
        assert np.asarray(maps.stats[LAYER].count)[sample] == count * 16
    whole = client.extract("bert", TEXTS, [trocar.tap(LAYER, reduce=trocar.top_k(4, dim=1), padding=True)])
    np.testing.assert_array_equal(whole[LAYER], np.sort(values, 1)[:, ::-1][:, :4])


@pytest.mark.parametrize("which", ["cls", "last"])
def test_the_first_and_last_token_of_texts_padded_on_the_left(client: Client, which: Any) -> None:
    maps = client.extract("gpt", TEXTS, [trocar.tap(GPT_LAYER, tokens=which)])
    assert maps.tokens.pads_left
    values = client.extract("gpt", TEXTS, [GPT_LAYER]).samples(GPT_LAYER)
    np.testing.assert_array_equal(maps[GPT_LAYER], [value[0 if which == "cls" else -1] for value in values])


def test_gram_matrices_and_pca_leave_padding_out(client: Client) -> None:
    gram = client.extract("bert", TEXTS, [trocar.tap(LAYER, reduce=trocar.gram())])[LAYER]
    own = alone(client)
    close(gram, [value.T @ value / len(value) for value in own])
    rows = np.random.default_rng(0).standard_normal((3, 16))
    tap = trocar.tap(LAYER, reduce=[trocar.channels(range(16)), trocar.pca(rows), trocar.pool("avg")])
    found = client.extract("bert", TEXTS, [tap])[LAYER]
    close(found, [(value @ rows.T).mean(0) for value in own])


def test_chosen_samples_and_tokens_keep_their_mask(client: Client) -> None:
    tap = trocar.tap(LAYER, samples=[2, 0], tokens=[0, 1, 3], stats=["count"], over="sample")
    maps = client.extract("bert", TEXTS, [tap])
    lengths = [len(value) for value in alone(client)]
    own = [sum(token < lengths[sample] for token in (0, 1, 3)) * 16 for sample in (2, 0)]
    np.testing.assert_array_equal(maps.stats[LAYER].count, own)


@pytest.mark.parametrize(("sample", "words"), [(0, "cat"), (1, "sat on"), (1, "mat"), (2, "hello")])
def test_characters_of_a_text_have_the_values_of_their_tokens(
    client: Client, sample: int, words: str
) -> None:
    maps = client.extract("gpt", TEXTS, [GPT_LAYER])
    start = TEXTS[sample].index(words)
    found = maps.span(GPT_LAYER, start, start + len(words), sample=sample)
    first = 1 + len(TEXTS[sample][:start].split())  # behind [CLS]; every word is a token
    expected = maps.samples(GPT_LAYER)[sample][first : first + len(words.split())]
    np.testing.assert_array_equal(found, expected)
    with pytest.raises(ValueError, match="no token"):
        maps.span(GPT_LAYER, 500, 600)


def test_a_mask_that_the_caller_sends_counts_as_well(client: Client) -> None:
    ids = np.array([[2, 4, 3, 0, 0], [2, 4, 5, 6, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}
    maps = client.extract("bert", inputs, [trocar.tap(LAYER, stats="count", over="sample")])
    np.testing.assert_array_equal(maps.stats[LAYER].count, [3 * 16, 5 * 16])
    assert maps[LAYER].shape == (2, 5, 16)


def test_padding_is_counted_where_asked_for(client: Client) -> None:
    taps = [
        trocar.tap(LAYER, reduce=trocar.pool("avg"), stats="count", padding=True),
        trocar.tap(LAYER, alias="all"),
    ]
    maps = client.extract("bert", TEXTS, [taps[0]])
    values = client.extract("bert", TEXTS, [LAYER])[LAYER]
    close(maps[LAYER], values.mean(1))


def own_square(options: dict[str, Any], layer: str = LAYER) -> Any:
    return trocar.value(layer, function="square", **options)


SCORES: list[tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = [
    ({"tokens": "cls"}, lambda own: own[0]),
    ({"tokens": "last"}, lambda own: own[-1]),
    ({"reductions": trocar.pool("avg")}, lambda own: own.mean(0)),
    ({"reductions": trocar.pool("max")}, lambda own: own.amax(0)),
    ({"reductions": trocar.pool("gem")}, lambda own: own.clamp(min=1e-6).pow(3).mean(0).pow(1 / 3)),
    ({"reductions": trocar.pool("avg", 2)}, lambda own: F.adaptive_avg_pool1d(own.T[None], 2)),
    ({"channels": [5, 2], "reductions": trocar.pool("max")}, lambda own: own[:, [5, 2]].amax(0)),
    ({"reductions": trocar.gram()}, lambda own: own.T @ own / len(own)),
    ({"reductions": trocar.top_k(2, dim=1)}, lambda own: own.topk(2, 0).values),
    ({"reductions": trocar.top_k(7, dim=1)}, lambda own: own.topk(min(7, len(own)), 0).values),
]
"""What an objective makes of a value, and of a text's own tokens."""


@pytest.mark.parametrize("index", range(len(SCORES)))
@pytest.mark.parametrize(("model", "layer"), [("bert", LAYER), ("gpt", GPT_LAYER)])
def test_objectives_of_tokens_and_their_gradients_are_those_of_torch_on_each_texts_own_tokens(
    client: Client, model: str, layer: str, index: int
) -> None:
    options, function = SCORES[index]
    found = client.gradients(model, TEXTS, of=own_square(options, layer), at=[layer], taps=[layer])
    assert found.tokens.pads_left == (model == "gpt")
    value = torch.from_numpy(found[layer].copy()).requires_grad_()
    mask = torch.from_numpy(found.tokens.mask.copy())
    sums = [function(own[kept]).square().sum() for own, kept in zip(value, mask, strict=True)]
    expected = torch.stack(sums).sum()
    (gradient,) = torch.autograd.grad(expected, value)
    assert found.objective == pytest.approx(expected.item(), rel=1e-5)
    close(found[f"{layer}/grad_out"], gradient)


@pytest.mark.parametrize("index", range(6))
def test_gradients_before_an_objective_of_tokens_are_those_of_each_text_alone(
    client: Client, index: int
) -> None:
    of, at = own_square(SCORES[index][0]), "model.encoder.layer.0"
    own = [client.gradients("bert", text, of=of, at=[at])[f"{at}/grad_out"][0] for text in TEXTS]
    found = client.gradients("bert", TEXTS, of=of, at=[at])[f"{at}/grad_out"]
    for sample, wanted in enumerate(own):
        close(found[sample, : len(wanted)], wanted)
        assert not found[sample, len(wanted) :].any()


def test_a_penalty_leaves_padding_out(client: Client) -> None:
    at = "model.encoder.layer.0"
    of = trocar.gradient_penalty(trocar.value(LAYER, tokens="last", function="square"), at=at)
    own = [client.gradients("bert", text, of=of, at=[at]).objective or 0 for text in TEXTS]
    assert client.gradients("bert", TEXTS, of=of, at=[at]).objective == pytest.approx(np.mean(own), rel=1e-3)


@pytest.mark.parametrize("index", [np.s_[:], np.s_[:, :7], np.s_[:, :, 3], np.s_[..., 2:5]])
def test_an_objective_of_selected_elements_counts_all_of_them(client: Client, index: Any) -> None:
    of = trocar.value(LAYER, reduce="mean", function="square", index=index)
    values = client.extract("bert", TEXTS, [LAYER])[LAYER]
    found = client.gradients("bert", TEXTS, of=of, at=[LAYER])
    assert found.objective == pytest.approx(np.square(values[index]).mean(), rel=1e-5)
    whole = client.gradients("bert", TEXTS, of=own_square({}), at=[LAYER])
    assert whole.objective == pytest.approx(np.square(values).sum(), rel=1e-5)


def test_a_mask_that_the_caller_sends_is_that_of_objectives_as_well(client: Client) -> None:
    ids = np.array([[2, 4, 3, 0, 0], [2, 4, 5, 6, 3]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 0).astype(np.int64)}
    found = client.gradients("bert", inputs, of=trocar.value(LAYER, tokens="last"), at=[LAYER])
    expected = np.zeros((2, 5, 16), np.float32)
    expected[[0, 1], [2, 4]] = 1
    np.testing.assert_array_equal(next(iter(found.values())), expected)


def test_what_follows_a_decoder_has_the_decoders_padding(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = transformers.T5Config(d_model=16, num_layers=1, num_heads=4, d_ff=16, d_kv=4, vocab_size=30)
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    ids = np.array([[3, 1, 4, 1, 5, 9], [2, 6, 5, 3, 5, 8]])
    mask = np.array([[1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1]])
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids[:, ::-1]}
    encoder = ["encoder.embed_tokens", "encoder.final_layer_norm", '/out["encoder_last_hidden_state"]']
    decoder = ["decoder.final_layer_norm", "lm_head", '/out["logits"]']
    taps = [
        trocar.tap(name, stats=["count"], over="channel", channel_dim=2, values=False)
        for name in (*encoder, *decoder)
    ]
    models = {"t5": {"source": f"hf:{tmp_path}"}}
    with running_server(models=models) as running, trocar.connect(running.address) as client:
        found = client.extract("t5", inputs, taps).stats
        for name in encoder:
            np.testing.assert_array_equal(found[name].count, 10)
        for name in decoder:
            np.testing.assert_array_equal(found[name].count, 12)
