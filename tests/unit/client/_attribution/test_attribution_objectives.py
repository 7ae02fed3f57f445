"""What is read from an objective beside its gradient."""

from typing import Any

import numpy as np
import pytest
import torch

import trocar
from trocar._attribution.attribution_objectives import (
    classes_of,
    for_samples,
    is_sum_over_samples,
    predicted,
    score_selectors,
    scores,
)

OUTPUT = np.random.default_rng(0).standard_normal((3, 5)).astype(np.float32)


@pytest.mark.parametrize(
    ("of", "function"),
    [
        (trocar.logit, lambda rows: rows),
        (trocar.probability, lambda rows: rows.softmax(1)),
        (trocar.log_probability, lambda rows: rows.log_softmax(1)),
    ],
)
def test_scores_are_torchs(of: Any, function: Any) -> None:
    rows = function(torch.from_numpy(OUTPUT).double())
    found = scores(of([4, 0, 1]), {"/out": OUTPUT}, [0, 1, 2], 3)
    np.testing.assert_allclose(found, rows[[0, 1, 2], [4, 0, 1]], rtol=1e-12)
    copies = scores(of([4, 0, 1]), {"/out": OUTPUT[[1, 2, 1, 2]]}, [1, 2, 1, 2], 3)
    np.testing.assert_allclose(copies, found[[1, 2, 1, 2]])


def test_large_logits_do_not_overflow() -> None:
    found = scores(trocar.probability(1), {"/out": np.array([[1e30, 1e30], [-1e30, 0]])}, [0, 1], 2)
    np.testing.assert_allclose(found, [0.5, 1.0])


def test_positions_are_summed() -> None:
    maps = np.random.default_rng(1).standard_normal((2, 5, 3, 4))
    found = scores(trocar.logit(3), {"/out": np.moveaxis(maps, 1, -1)}, [0, 1], 2)
    np.testing.assert_allclose(found, maps[:, 3].sum(axis=(1, 2)))
    tokens = maps[..., 0].transpose(0, 2, 1)
    np.testing.assert_allclose(
        scores(trocar.logit(3), {"/out": tokens}, [0, 1], 2), tokens[:, :, 3].sum(axis=1)
    )


def test_terms_are_weighted_and_may_be_elsewhere() -> None:
    of = 2 * trocar.logit(0) - trocar.logit([1, 2, 3], at="fc")
    assert score_selectors(of) == ("/out", "fc")
    found = scores(of, {"/out": OUTPUT, "fc": OUTPUT + 1}, [0, 1, 2], 3)
    np.testing.assert_allclose(found, 2 * OUTPUT[:, 0] - (OUTPUT + 1)[[0, 1, 2], [1, 2, 3]], rtol=1e-6)


def test_classes_are_known_where_there_is_one_for_each_sample() -> None:
    assert classes_of(trocar.logit(3), 2) == (3, 3)
    assert classes_of(trocar.probability([3, 1]), 2) == (3, 1)
    assert classes_of(trocar.logit(3) + trocar.log_probability(3), 2) == (3, 3)
    assert classes_of(trocar.logit(3) - trocar.logit(1), 2) is None
    assert classes_of(trocar.value("layer4"), 2) is None


def test_classes_for_another_number_of_samples_are_refused() -> None:
    for call in (
        lambda: classes_of(trocar.logit([1, 2]), 3),
        lambda: for_samples(trocar.logit([1, 2]), [0], 3),
        lambda: scores(trocar.logit([1, 2]), {"/out": OUTPUT}, [0, 1, 2], 3),
    ):
        with pytest.raises(ValueError, match="names 2 classes for 3 samples"):
            call()


def test_a_class_that_there_is_not_is_refused() -> None:
    with pytest.raises(ValueError, match="there are 5 classes; asked for 5 to 5"):
        scores(trocar.logit(5), {"/out": OUTPUT}, [0, 1, 2], 3)


def test_objectives_are_cut_and_copied_with_the_samples() -> None:
    of = trocar.logit([4, 0, 1]) + 0.5 * trocar.logit(2)
    taken = for_samples(of, [2, 0, 2, 0], 3)
    first, second = taken.to_wire().terms
    assert list(first.class_score.classes) == [1, 4, 1, 4]
    assert (list(second.class_score.classes), second.weight) == ([2], 0.5)
    assert list(of.to_wire().terms[0].class_score.classes) == [4, 0, 1]  # as it was


@pytest.mark.parametrize(
    ("of", "expected"),
    [
        (trocar.logit(1), True),
        (trocar.logit(1) - trocar.value("fc"), True),
        (trocar.value("fc", reduce="mean"), False),
        (trocar.value("fc", reduce="norm"), False),
        (trocar.loss("cross_entropy", [0, 1]), False),
        (trocar.gradient_penalty(trocar.logit(1)), False),
    ],
)
def test_what_depends_on_the_whole_batch_is_known(of: trocar.Objective, expected: bool) -> None:
    assert is_sum_over_samples(of) is expected


def test_the_predicted_class_is_the_first_of_the_largest() -> None:
    of = predicted(np.array([[0.0, 2.0, 2.0], [5.0, -1.0, 0.0]]))
    assert classes_of(of, 2) == (1, 0)


@pytest.mark.parametrize("shape", [(2,), (2, 0), (2, 3, 4), (2, 21, 8, 8)])
def test_an_output_without_one_class_for_each_sample_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="of="):
        predicted(np.zeros(shape))
