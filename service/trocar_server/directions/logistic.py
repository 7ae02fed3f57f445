"""Logistic regression with an L2 penalty, in float64, by Newton's method.

    fitted = fit_logistic(rows, labels, class_count=2, weights=weights, l2=1.0)
    fitted.vectors, fitted.bias

It minimises

    sum of weights * -log p(label | x)  +  l2 / 2 * |vectors|^2

over vectors and bias, which is not penalised: scikit-learn's `LogisticRegression(C=1 / l2)`. Of two classes
there is one vector, towards the second; of more one for each class, of a softmax, and the biases add up to 0.

# Note: [A solver of our own]
scikit-learn's solvers take all samples as one array and stop at a gradient of `tol`; a Newton step of sums
over blocks needs channels squared of memory, whatever the samples, and ends at the rounding error after about
ten passes. With fewer samples than channels the vectors are combinations of the samples (the gradient of the
loss is), so the same problem is solved in the coordinates of an orthonormal basis of these.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from trocar_server.directions.direction_request import Ints, rejected
from trocar_server.directions.rows import MEMORY_BYTES, Floats, Rows

_MAX_STEPS = 100
_MAX_INNER = 500
_PATIENCE = 20
"""Products of a step with an older conditioner; making one costs more."""
_TOLERANCE = 1e-12
"""Of the gradient, relative to that at the start."""
_SMALLEST_STEP = 2.0**-40
_SMALLEST_SHARE = 1e-12

Check: TypeAlias = Callable[[], None]
"""Raises to stop."""


@dataclass(frozen=True)
class Linear:
    """Fitted vectors of (vectors, channels), and bias of (vectors,).

    Attributes:
        vectors: The vectors.
        bias: Their bias.
        conditioner: About the inverse of the Hessian there, for the fit to similar samples; None without one.
    """

    vectors: Floats
    bias: Floats
    conditioner: Floats | None = None


def fit_logistic(
    rows: Rows,
    labels: Ints,
    class_count: int,
    weights: Floats,
    l2: float,
    check: Check = lambda: None,
    guess: Linear | None = None,
) -> Linear:
    """Fit vectors to samples.

    Args:
        rows: The samples.
        labels: The class of each that counts.
        class_count: The number of classes, at least 2.
        weights: The weight of each.
        l2: The factor of the penalty.
        check: Called between passes over the samples.
        guess: The fit to similar samples, such as those of all folds, to begin with.

    Raises:
        ServiceError: `DIRECTION_REJECTED`, neither samples nor channels fit in memory.
    """
    if rows.count < rows.channel_count and rows.fits_in_memory:
        basis, inner = np.linalg.qr(rows.array().T)  # (channels, samples), (samples, samples)
        reduced = Rows.of(lambda: iter((inner.T,)), rows.count, inner.shape[0])
        solution = _solve(reduced, labels, class_count, weights, l2, check, None)
        return Linear(solution.vectors @ basis.T, solution.bias)
    if 8 * (rows.channel_count + 1) ** 2 > MEMORY_BYTES:
        raise rejected(
            f"{rows.count:,} samples of {rows.channel_count:,} channels: a logistic regression needs one of "
            "the two to be smaller; choose channels, or give fewer samples"
        )
    return _solve(rows, labels, class_count, weights, l2, check, guess)


def _solve(
    rows: Rows,
    labels: Ints,
    class_count: int,
    weights: Floats,
    l2: float,
    check: Check,
    guess: Linear | None,
) -> Linear:
    mean, _ = rows.moments(weights)  # centred, so that bias and vectors are almost independent
    centred = rows.centred(mean).held()
    problem = _Problem(centred, labels, class_count, weights, l2)
    begin, conditioner = np.zeros((problem.vector_count, problem.width)), None
    if guess is not None:
        begin = np.column_stack([guess.vectors, guess.bias + guess.vectors @ mean])
        conditioner = guess.conditioner
    parameters, conditioner = _minimised(problem, begin, conditioner, check)
    vectors, bias = parameters[:, :-1], parameters[:, -1]
    bias = bias - vectors @ mean
    return Linear(vectors, bias - bias.mean() if class_count > 2 else bias, conditioner)


class _Problem:
    """The objective: parameters are of shape (vectors, channels + 1), the bias last."""

    def __init__(self, rows: Rows, labels: Ints, class_count: int, weights: Floats, l2: float) -> None:
        self.rows, self.weights, self.l2 = rows, weights, l2
        self.vector_count = 1 if class_count == 2 else class_count
        self.width = rows.channel_count + 1
        if class_count == 2:
            self.targets = labels[:, None].astype(np.float64)
        else:
            self.targets = np.eye(class_count)[labels]
        self.has_own_conditioners = 8 * class_count * self.width**2 <= MEMORY_BYTES
        self.penalty = np.full(self.width, l2)
        self.penalty[-1] = 0.0

    def value_and_gradient(self, parameters: Floats) -> tuple[float, Floats, Floats]:
        """Return the objective, its gradient, and the probabilities of the samples."""
        scores = self.rows.products(parameters[:, :-1]) + parameters[:, -1]
        probabilities, losses = _probabilities(scores, self.targets)
        value = float(self.weights @ losses) + 0.5 * float((self.penalty * np.square(parameters)).sum())
        gradient = self._transposed((probabilities - self.targets) * self.weights[:, None])
        return value, gradient + self.penalty * parameters, probabilities

    def _transposed(self, residuals: Floats) -> Floats:
        """Return residuals (samples, vectors), times the samples and 1: (vectors, channels + 1)."""
        result = np.zeros((residuals.shape[1], self.width))
        for at, values in self.rows.blocks():
            result[:, :-1] += residuals[at].T @ values
        result[:, -1] = residuals.sum(0)
        return result

    def curvature(self, factors: Floats) -> Floats:
        """Return the sum of factor * x x^T over the samples with 1 appended, plus the penalty."""
        result, roots = np.zeros((self.width, self.width)), np.sqrt(factors)
        for at, values in self.rows.blocks():
            weighted = values * roots[at, None]
            result[:-1, :-1] += weighted.T @ weighted  # of one array: half of the work
            result[-1, :-1] += roots[at] @ weighted
        result[:-1, -1] = result[-1, :-1]
        result[-1, -1] = max(factors.sum(), _SMALLEST_SHARE * self.weights.sum())  # all are certain
        return result + np.diag(self.penalty)

    def applied(self, direction: Floats, probabilities: Floats) -> Floats:
        """Return the Hessian, times a direction."""
        changes = self.rows.products(direction[:, :-1]) + direction[:, -1]
        if self.vector_count == 1:
            residuals = probabilities * (1 - probabilities) * changes
        else:
            residuals = probabilities * (changes - (probabilities * changes).sum(1, keepdims=True))
        return self._transposed(residuals * self.weights[:, None]) + self.penalty * direction


def _probabilities(scores: Floats, targets: Floats) -> tuple[Floats, Floats]:
    """Return probabilities, and the loss of each sample."""
    if scores.shape[1] == 1:
        losses = np.logaddexp(0.0, scores)[:, 0] - (scores * targets)[:, 0]
        return np.exp(-np.logaddexp(0.0, -scores)), losses
    shifted = scores - scores.max(1, keepdims=True)
    exponentials = np.exp(shifted)
    totals = exponentials.sum(1, keepdims=True)
    return exponentials / totals, np.log(totals[:, 0]) - (shifted * targets).sum(1)


def _minimised(
    problem: _Problem, parameters: Floats, conditioner: Floats | None, check: Check
) -> tuple[Floats, Floats | None]:
    """Return where the objective is smallest, and the conditioner of the last steps."""
    value, gradient, probabilities = problem.value_and_gradient(parameters)
    start, best = np.abs(problem.value_and_gradient(np.zeros_like(parameters))[1]).max(), np.inf
    for _ in range(_MAX_STEPS):
        check()
        largest = float(np.abs(gradient).max())
        if largest <= _TOLERANCE * start or largest >= best:  # at the rounding error no step helps
            break
        accuracy = min(0.1, largest / start)
        step = None
        if conditioner is not None:
            step = _conjugate_step(problem, gradient, probabilities, conditioner, accuracy, check)
        if step is None:  # for the first time, or the conditioner is of a place too far away
            conditioner = _conditioner(problem, probabilities)
            step = _conjugate_step(problem, gradient, probabilities, conditioner, accuracy, check, _MAX_INNER)
        moved = None if step is None else _moved(problem, parameters, value, gradient, step)
        if moved is None:
            break
        if moved[1] >= value:  # the objective cannot tell any more; the gradient decides
            best = largest
        parameters, value, gradient, probabilities = moved
    return parameters, conditioner


def _moved(
    problem: _Problem, parameters: Floats, value: float, gradient: Floats, step: Floats
) -> tuple[Floats, float, Floats, Floats] | None:
    """Return the parameters after a step, shortened until the objective falls; None if it does not."""
    slope, factor = float((gradient * step).sum()), 1.0
    rounding = 1e-13 * max(1.0, abs(value))
    while factor > _SMALLEST_STEP:
        tried = parameters - factor * step
        outcome = problem.value_and_gradient(tried)
        if outcome[0] <= value - 1e-4 * factor * slope + rounding:
            return tried, *outcome
        factor /= 2
    return None


def _conditioner(problem: _Problem, probabilities: Floats) -> Floats:
    """Return the inverse of each class's own block of the Hessian, (classes, channels + 1, channels + 1).

    Where these do not fit in memory, of a bound for all: at most half of (identity - 1 / classes) times the
    sum of x x^T, Boehning 1992.
    """
    if not problem.has_own_conditioners:
        bound = problem.curvature(0.5 * problem.weights * (1 - 1 / problem.vector_count))
        return np.asarray(np.linalg.inv(bound)[None], np.float64)
    factors = (probabilities * (1 - probabilities) * problem.weights[:, None]).T
    return np.stack([np.linalg.inv(problem.curvature(each)) for each in factors]).astype(np.float64)


def _conjugate_step(
    problem: _Problem,
    gradient: Floats,
    probabilities: Floats,
    conditioner: Floats,
    accuracy: float,
    check: Check,
    most: int = _PATIENCE,
) -> Floats | None:
    """Return the Newton step by conjugate gradients; None if that takes too many products.

    A product with the Hessian costs two passes over the samples, and a Hessian as many as there are channels.
    """
    step, residual = np.zeros_like(gradient), gradient.copy()
    conditioned = (residual[:, None] @ conditioner)[:, 0]
    direction, product = conditioned.copy(), float((residual * conditioned).sum())
    wanted = product * accuracy**2
    for _ in range(most):
        check()
        applied = problem.applied(direction, probabilities)
        curvature = float((direction * applied).sum())
        if not curvature > 0:
            return step if step.any() else None
        length = product / curvature
        step += length * direction
        residual -= length * applied
        conditioned = (residual[:, None] @ conditioner)[:, 0]
        following = float((residual * conditioned).sum())
        if following <= wanted:
            return step
        direction = conditioned + (following / product) * direction
        product = following
    return step if most == _MAX_INNER else None
