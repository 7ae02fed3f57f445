"""Matrix decompositions, for which the feature was asked: bit-equal gradients, memory within the budget."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import linalg

from tests.support.spool.spool_networks import sites, svd_chain
from tests.unit.spool.steps import open_spool
from trocar_server.spool import Spool

_SIDE = 12


def _positive(x: torch.Tensor) -> torch.Tensor:
    return x @ x.mH + _SIDE * torch.eye(_SIDE, dtype=x.dtype)


def _of(*parts: torch.Tensor) -> torch.Tensor:
    """A number that does not depend on phases, which decompositions leave open."""
    squares = [part.abs().square() for part in parts]
    return torch.stack([(square / (1 + square)).sum() for square in squares]).sum()


DECOMPOSITIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "svd": lambda x: _of(*linalg.svd(x, full_matrices=False)),
    "svd of a wide one": lambda x: _of(*linalg.svd(x[..., :7, :], full_matrices=False)),
    "svd by its old name": lambda x: _of(*torch.svd(x)),
    "singular values": lambda x: _of(linalg.svdvals(x)),
    "qr": lambda x: _of(*linalg.qr(x)),
    "qr of a wide one": lambda x: _of(*linalg.qr(x[..., :7, :])),
    "eigh": lambda x: _of(*linalg.eigh(x + x.mH)),
    "eigenvalues": lambda x: _of(linalg.eigvalsh(x + x.mH)),
    "eig": lambda x: _of(*linalg.eig(x)),
    "cholesky": lambda x: _of(linalg.cholesky(_positive(x))),
    "cholesky and solve": lambda x: _of(torch.cholesky_solve(x, linalg.cholesky(_positive(x)))),
    "cholesky and inverse": lambda x: _of(torch.cholesky_inverse(linalg.cholesky(_positive(x)))),
    "lu": lambda x: _of(*linalg.lu(_positive(x))[1:]),
    "lu and solve": lambda x: _of(linalg.lu_solve(*linalg.lu_factor(_positive(x)), x)),
    "solve": lambda x: _of(linalg.solve(_positive(x), x)),
    "triangular solve": lambda x: _of(linalg.solve_triangular(_positive(x).tril(), x, upper=False)),
    "inverse": lambda x: _of(linalg.inv(_positive(x))),
    "pseudoinverse": lambda x: _of(linalg.pinv(x[..., :, :7])),
    "least squares": lambda x: _of(linalg.lstsq(_positive(x), x).solution),
    "determinant": lambda x: linalg.slogdet(_positive(x)).logabsdet.sum(),
    "exponential": lambda x: _of(linalg.matrix_exp(x / 10)),
    "nuclear norm": lambda x: linalg.matrix_norm(x, "nuc").sum(),
    "householder": lambda x: _of(linalg.householder_product(x.tril(-1), x[..., 0] / 10)),
}


def _matrices(dtype: torch.dtype) -> torch.Tensor:
    numbers = torch.Generator().manual_seed(3)
    return torch.randn(4, _SIDE, _SIDE, dtype=dtype, generator=numbers).requires_grad_()


def _gradients(work: Callable[[], torch.Tensor], leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return list(torch.autograd.grad(work(), leaves))


def _within(spool: Spool, work: Callable[[], torch.Tensor]) -> torch.Tensor:
    with spool:
        return work()


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128])
@pytest.mark.parametrize("name", DECOMPOSITIONS)
def test_gradients_are_the_same_bits(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    x = _matrices(dtype)

    def work() -> torch.Tensor:
        return DECOMPOSITIONS[name](x)

    expected = _gradients(work, [x])
    with open_spool(tmp_path, 0, min_bytes=0) as spool:
        assert torch.equal(_gradients(lambda: _within(spool, work), [x])[0], expected[0])
        assert spool.report().written_bytes > 0
        assert expected[0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_decompositions_of_decompositions(tmp_path: Path, dtype: torch.dtype) -> None:
    x = _matrices(dtype)

    def work() -> torch.Tensor:
        u, s, vh = linalg.svd(x, full_matrices=False)
        q, r = linalg.qr((u[..., :8] * s[..., None, :8]) @ vh[..., :8, :] + 0.1 * x)
        values, _ = linalg.eigh(r @ r.mH)
        root = linalg.cholesky(q @ torch.diag_embed(values + 1).to(dtype) @ q.mH + _positive(x))
        loss: torch.Tensor = s.sum() + _of(linalg.solve_triangular(root, x, upper=False))
        return loss

    expected = _gradients(work, [x])
    with open_spool(tmp_path, 3_000, min_bytes=16) as spool:
        for _ in range(2):
            assert torch.equal(_gradients(lambda: _within(spool, work), [x])[0], expected[0])


def test_second_derivatives_of_decompositions(tmp_path: Path) -> None:
    x = _matrices(torch.float64)

    def second() -> torch.Tensor:
        total = x.sum() * 0
        for name in ("svd", "qr", "eigh", "cholesky"):
            (first,) = torch.autograd.grad(DECOMPOSITIONS[name](x), x, create_graph=True)
            total = total + first.square().sum()
        return total

    expected = _gradients(second, [x])
    with open_spool(tmp_path, 2_000, min_bytes=0) as spool:
        assert torch.equal(_gradients(lambda: _within(spool, second), [x])[0], expected[0])


@pytest.mark.parametrize("budget_bytes", [0, 100_000, 400_000])
def test_a_chain_of_svds_stays_within_the_budget(tmp_path: Path, budget_bytes: int) -> None:
    tensors = sites(count=24, bond=40)
    expected = _gradients(lambda: svd_chain(tensors), tensors)
    with open_spool(tmp_path, budget_bytes, min_bytes=1024) as spool:
        for _ in range(2):
            found = _gradients(lambda: _within(spool, lambda: svd_chain(tensors)), tensors)
            assert all(map(torch.equal, found, expected))
        report = spool.report()
    largest = 80 * 40 * 8
    assert report.unique_bytes > 2 * 1_000_000
    assert report.peak_bytes <= budget_bytes + largest
    assert all(gradient.any() and gradient.isfinite().all() for gradient in expected)
