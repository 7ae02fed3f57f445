"""A chain of decompositions as in tensor networks: many matrices saved, no parameters to speak of.

A row of tensors (left bond, physical, right bond) is contracted site by site; after each site the matrix is
decomposed and cut to the largest singular values, as in a boundary matrix product state.
"""

import torch

CUT = 1e-3
"""Keeps the gradient of the decomposition finite where singular values come close."""


def sites(count: int, bond: int, physical: int = 2, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Return the leaves: `count` tensors of shape (bond, physical, bond)."""
    numbers = torch.Generator().manual_seed(0)
    shape = (bond, physical, bond)
    made = [torch.randn(shape, dtype=dtype, generator=numbers) / bond**0.5 for _ in range(count)]
    return [tensor.requires_grad_() for tensor in made]


def svd_chain(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Contract a row with singular value decompositions; returns the sum of the logarithms of the norms.

    Every step saves the matrix's parts U (bond * physical, bond), S (bond) and Vh (bond, bond), and the
    operands of two products.
    """
    left = torch.eye(tensors[0].shape[0], dtype=tensors[0].dtype)
    total = left.new_zeros(())
    for tensor in tensors:
        bond = tensor.shape[-1]
        merged = torch.einsum("ab,bpc->apc", left, tensor).reshape(-1, bond)
        u, s, vh = torch.linalg.svd(merged, full_matrices=False)
        keep = max(bond // 2, 1)
        norm = s[:keep].norm()
        spread = (u[:, :keep].square().mean(0) * s[:keep]).sum().abs()
        total = total + norm.log() + CUT * spread
        left = torch.diag(s / norm).to(vh.dtype) @ vh
    return total
