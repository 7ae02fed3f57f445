"""Chosen tokens, against transformers' own processors of logits and the distribution."""

from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chisquare
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from trocar_server.engine.generate.sampling import Sampler, Sampling

CPU = torch.device("cpu")
LOGITS = torch.randn(40, generator=torch.Generator().manual_seed(1)) * 2
PROMPT = [3, 5, 5, 9]


def expected(sampling: Sampling, logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """The probabilities by transformers, in the order of its own generation."""
    steps: list[Any] = []
    if sampling.logit_bias:
        bias: Any = [[[key], number] for key, number in sampling.logit_bias.items()]
        steps.append(SequenceBiasLogitsProcessor(bias))
    if sampling.repetition_penalty is not None:
        steps.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    if sampling.temperature is not None:
        steps.append(TemperatureLogitsWarper(sampling.temperature))
    if sampling.top_k is not None:
        steps.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        steps.append(TopPLogitsWarper(sampling.top_p))
    if sampling.min_p is not None:
        steps.append(MinPLogitsWarper(sampling.min_p))
    process: Any = LogitsProcessorList(steps)
    scores: torch.Tensor = process(torch.tensor([ids]), logits[None].clone())
    return scores.softmax(-1)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1.0},
        {"temperature": 0.6, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.1},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.4},
        {"temperature": 1.0, "repetition_penalty": 1.4, "logit_bias": {3: -1.0, 5: 2.5}},
    ],
)
def test_draws_have_the_distribution_of_transformers(options: dict[str, Any]) -> None:
    sampling = Sampling(seed=11, **options)
    probabilities = expected(sampling, LOGITS, PROMPT).double()
    sampler, count = Sampler(sampling, CPU), 20_000
    drawn = [sampler.choose(LOGITS, PROMPT, []).token_id for _ in range(count)]
    counts = np.bincount(drawn, minlength=len(LOGITS))
    wanted = (probabilities / probabilities.sum() * count).numpy()
    assert not counts[wanted == 0].any()
    frequent = wanted >= 5
    observed = [*counts[frequent], counts[~frequent].sum()]
    due = [*wanted[frequent], wanted[~frequent].sum()]
    kept = [(one, other) for one, other in zip(observed, due, strict=True) if other > 0]
    counted, expected_counts = zip(*kept, strict=True)
    assert chisquare(counted, expected_counts, sum_check=False).pvalue > 1e-4


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    logits = torch.zeros(5)
    logits[[1, 3]] = 2.0
    choice = Sampler(Sampling(logprobs=2), CPU).choose(logits, PROMPT, [])
    assert choice.token_id == 1
    assert choice.logprob == float(logits.log_softmax(-1)[1])
    assert {token for token, _ in choice.likely} == {1, 3}


def test_bias_and_presence_change_what_is_chosen_and_no_logprob() -> None:
    best = int(LOGITS.argmax())
    banned = Sampler(Sampling(logit_bias={best: -100.0}), CPU).choose(LOGITS, PROMPT, [])
    assert banned.token_id != best
    assert banned.logprob == float(LOGITS.log_softmax(-1)[banned.token_id])
    repeated = Sampler(Sampling(presence_penalty=100.0), CPU).choose(LOGITS, PROMPT, [best])
    assert repeated.token_id == banned.token_id


def test_a_seed_is_a_text() -> None:
    def drawn(seed: int) -> list[int]:
        sampler = Sampler(Sampling(temperature=1.0, seed=seed), CPU)
        return [sampler.choose(LOGITS, PROMPT, []).token_id for _ in range(20)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
