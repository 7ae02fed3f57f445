"""Losses of texts and pairs against those of transformers and sentence-transformers, bit for bit."""

# transformers and timm are half typed.
# pyright: reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false
# pyright: reportPrivateImportUsage=false, reportOptionalMemberAccess=false, reportIndexIssue=false

from typing import Any

import pytest
import torch
import transformers as T
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
from torch import Tensor
from torch.nn import functional as F

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.surgery.axes.layout import Layout, Meaning, Piece
from trocar_server.training.losses.loss_function import LossFunction
from trocar_server.training.spec.trainer_spec import LossSpec, TeacherSpec

IDS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
LABELS = torch.tensor([[-100, 1, 4, 1, 5], [9, 2, -100, -100, -100]])
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "vocab_size": 30,
}
VECTORS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


def loss(name: Any, value: Tensor, target: Tensor | None = None, **options: Any) -> Tensor:
    """Compute one loss as a trainer does: checked, then computed."""
    function = LossFunction([LossSpec(name=name, options=options)])
    targets = {} if target is None else {"": target}
    function.check_targets(targets, len(value), {0: value.shape})
    return function(value, {}, targets)[0]


def model(kind: Any, config: Any) -> Any:
    torch.manual_seed(0)
    return kind(config).eval()


@pytest.mark.parametrize("labels", [IDS, LABELS], ids=["all", "masked"])
def test_the_causal_loss_and_its_gradient_are_those_of_transformers(labels: Tensor) -> None:
    made = model(T.GPT2LMHeadModel, T.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=30))
    output = made(input_ids=IDS, labels=labels)
    assert torch.equal(loss("causal_lm", output.logits, labels), output.loss)
    (ours,) = torch.autograd.grad(loss("causal_lm", output.logits, labels), output.logits, retain_graph=True)
    (own,) = torch.autograd.grad(output.loss, output.logits)
    assert torch.equal(ours, own)


ADVANTAGES = torch.tensor([[0.0, 1.0, -2.0, 0.5, 1.5], [0.0, -1.0, 9.0, 9.0, 9.0]])
LOGITS = torch.randn(2, 5, 30, generator=torch.Generator().manual_seed(1)) * 3


def policy(targets: dict[str, Tensor], value: Tensor = LOGITS, /, **options: Any) -> Tensor:
    function = LossFunction([LossSpec(name="policy_gradient", options=options)])
    function.check_targets(targets, len(value), {0: value.shape})
    return function(value, {}, targets)[0]


def drawn_logs(value: Tensor = LOGITS) -> Tensor:
    """The logarithms of the probabilities of tokens 1 to 4, by torch's own distribution."""
    logs: Tensor = torch.distributions.Categorical(logits=value[:, :-1]).log_prob(IDS[:, 1:])
    return logs


COUNTED = LABELS[:, 1:] != -100


def test_the_policy_gradient_is_minus_the_logarithm_times_the_advantage() -> None:
    value = LOGITS.clone().requires_grad_(True)
    ours = policy({"token_ids": LABELS, "advantages": ADVANTAGES}, value)
    expected = -(drawn_logs(value) * ADVANTAGES[:, 1:])[COUNTED].mean()
    torch.testing.assert_close(ours, expected)
    (gradient,), (own,) = torch.autograd.grad(ours, value), torch.autograd.grad(expected, value)
    torch.testing.assert_close(gradient, own)
    of_samples = policy({"": LABELS, "advantages": torch.tensor([2.0, -1.0])}, reduction="sum")
    torch.testing.assert_close(of_samples, -(drawn_logs() * torch.tensor([[2.0], [-1.0]]))[COUNTED].sum())


@pytest.mark.parametrize("clip", [None, 0.2])
def test_with_logprobs_the_policy_gradient_is_weighted_by_ratios(clip: float | None) -> None:
    before = F.pad(drawn_logs() + 0.6 * torch.tensor([[-1.0, 1.0, 0.1, -0.1]]), (1, 0))
    options: dict[str, Any] = {} if clip is None else {"clip": clip}
    ours = policy({"token_ids": LABELS, "advantages": ADVANTAGES, "logprobs": before}, **options)
    ratios, gains = (drawn_logs() - before[:, 1:]).exp(), ADVANTAGES[:, 1:]
    expected = ratios * gains
    if clip is not None:
        expected = torch.minimum(expected, ratios.clamp(1 - clip, 1 + clip) * gains)
    torch.testing.assert_close(ours, -expected[COUNTED].mean())


@pytest.mark.parametrize(
    ("further", "problem"),
    [
        ({}, "comes with a target 'advantages'"),
        ({"advantages": torch.zeros(3)}, "'advantages' of shape \\(3,\\)"),
        ({"advantages": torch.zeros(2, dtype=torch.int64)}, "dtype int64"),
        ({"advantages": torch.full((2,), torch.nan)}, "finite"),
        ({"advantages": torch.zeros(2), "logprobs": torch.zeros(2)}, "'logprobs' of shape"),
    ],
)
def test_further_targets_that_do_not_fit_are_refused(further: dict[str, Tensor], problem: str) -> None:
    with pytest.raises(ServiceError, match=problem) as raised:
        policy({"token_ids": LABELS, **further})
    assert raised.value.reason is ErrorReason.TARGET_REJECTED


def test_the_token_loss_is_that_of_transformers() -> None:
    made = model(T.BertForTokenClassification, T.BertConfig(**SIZES, num_labels=10))
    output = made(input_ids=IDS, labels=LABELS)
    assert torch.equal(loss("token_cross_entropy", output.logits, LABELS), output.loss)


def test_the_loss_of_classified_texts_is_that_of_transformers() -> None:
    made = model(T.BertForSequenceClassification, T.BertConfig(**SIZES, num_labels=3))
    labels = torch.tensor([2, 0])
    output = made(input_ids=IDS, labels=labels)
    assert torch.equal(loss("cross_entropy", output.logits, labels), output.loss)


@pytest.mark.parametrize("scale", [20.0, 5.0])
def test_the_contrastive_loss_is_that_of_sentence_transformers(scale: float) -> None:
    theirs: Any = MultipleNegativesRankingLoss(model=None, scale=scale)
    own = theirs.compute_loss_from_embeddings([*VECTORS.chunk(2)], None)
    torch.testing.assert_close(loss("contrastive", VECTORS, scale=scale), own, rtol=1e-6, atol=0)


def test_the_symmetric_loss_is_that_of_clip() -> None:
    from transformers.models.clip.modeling_clip import image_text_contrastive_loss

    first, second = F.normalize(VECTORS, dim=1).chunk(2)
    scores = first @ second.T * 20.0
    own = image_text_contrastive_loss(scores)
    assert torch.equal(loss("contrastive_logits", scores), own)
    assert torch.equal(loss("contrastive", VECTORS, is_symmetric=True), own)


@pytest.mark.parametrize(
    ("name", "value", "target", "problem"),
    [
        ("causal_lm", torch.zeros(2, 5, 30), IDS[:, :4], "have shape \\(2, 5\\)"),
        ("causal_lm", torch.zeros(2, 5, 6), IDS, "from 0 to 5"),
        ("causal_lm", torch.zeros(2, 5, 30), torch.tensor([[3, *[-100] * 4]] * 2), "only labels equal"),
        ("token_cross_entropy", torch.zeros(2, 5, 30), IDS.float(), "labels are integers"),
    ],
)
def test_labels_that_do_not_fit_are_refused_before_the_pass(
    name: str, value: Tensor, target: Tensor, problem: str
) -> None:
    with pytest.raises(ServiceError, match=problem) as error:
        loss(name, value, target)
    assert error.value.reason is ErrorReason.TARGET_REJECTED


@pytest.mark.parametrize(("name", "shape"), [("contrastive", (3, 4)), ("contrastive_logits", (3, 4))])
def test_values_without_pairs_are_refused(name: str, shape: tuple[int, ...]) -> None:
    with pytest.raises(ServiceError, match="pairs") as error:
        loss(name, torch.zeros(shape))
    assert error.value.reason is ErrorReason.TRAINER_INVALID


TOKENS, TAUGHT = torch.randn(2, 2, 7, 5, generator=torch.Generator().manual_seed(1))
"""Logits (batch, tokens, classes) of a student and of its teacher."""
MASK = torch.tensor([[1, 1, 1, 1, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1]])


@pytest.mark.parametrize("mask", [None, "attention_mask", "decoder_attention_mask"])
@pytest.mark.parametrize("reduction", ["batchmean", "sum"])
def test_a_model_of_texts_learns_the_classes_of_each_token_that_counts(mask: Any, reduction: Any) -> None:
    """As the distillation of DistilBERT: logits of the tokens that count, in rows."""
    teacher: Any = TeacherSpec(model_id="t")
    options = {"temperature": 2.0, "reduction": reduction}
    function = LossFunction([LossSpec(name="kl_div", teacher=teacher, options=options)], of_texts=True)
    arguments = {} if mask is None else {mask: MASK}
    total, _ = function(TOKENS, {}, {}, {teacher: TAUGHT}, arguments)
    counts = torch.ones_like(MASK) if mask is None else MASK
    logs, taught = (F.log_softmax(TOKENS / 2, -1), F.softmax(TAUGHT / 2, -1))
    rows, others = logs[counts == 1], taught[counts == 1]
    assert torch.equal(total, F.kl_div(rows, others, reduction=reduction) * 4)


def test_probabilities_of_tokens_are_compared_with_each_token() -> None:
    function = LossFunction([LossSpec(name="kl_div")], of_texts=True)
    probabilities = F.softmax(TAUGHT, -1)
    function.check_targets({"": probabilities}, len(TOKENS), {0: TOKENS.shape})
    total, _ = function(TOKENS, {}, {"": probabilities}, {}, {"attention_mask": MASK})
    rows = F.log_softmax(TOKENS, -1)[MASK == 1]
    assert torch.equal(total, F.kl_div(rows, probabilities[MASK == 1], reduction="batchmean"))
    with pytest.raises(ServiceError, match="a sample's sum to 1") as failure:
        function.check_targets({"": F.softmax(TAUGHT, 1)}, len(TOKENS), {0: TOKENS.shape})
    assert failure.value.reason is ErrorReason.TARGET_REJECTED


@pytest.mark.parametrize(
    ("selector", "masks", "counts"),
    [
        ("", ["attention_mask"], None),
        ("decoder.bert.encoder.layer.3", ["attention_mask"], None),
        ("", ["attention_mask", "decoder_attention_mask"], 1 - MASK),
        ("encoder.layer.3", ["attention_mask", "decoder_attention_mask"], MASK),
    ],
)
def test_the_mask_of_an_encoder_is_not_that_of_its_decoder(
    selector: str, masks: list[str], counts: Tensor | None
) -> None:
    """Also where both have one length: a decoder with inputs of its own has a mask of its own, or none."""
    teacher: Any = TeacherSpec(model_id="t")
    axis = "tokens" if selector.startswith("encoder") else "target_tokens"
    layout = Layout(
        (Meaning("batch"), Meaning(axis, (Piece(axis),)), Meaning("channels")),
        {"tokens": "attention_mask", "target_tokens": "decoder_attention_mask"},
    )
    spec = LossSpec(name="kl_div", teacher=teacher, selector=selector)
    function = LossFunction([spec], of_texts=True, layout_of={selector: layout}.__getitem__)
    arguments = dict(zip(masks, (MASK, 1 - MASK), strict=False))
    total, _ = function(TOKENS, {selector: TOKENS}, {}, {teacher: TAUGHT}, arguments)
    counted = torch.ones_like(MASK) if counts is None else counts
    rows, taught = F.log_softmax(TOKENS, -1)[counted == 1], F.softmax(TAUGHT, -1)[counted == 1]
    assert torch.equal(total, F.kl_div(rows, taught, reduction="batchmean"))
