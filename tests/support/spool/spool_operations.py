"""What a random program of `spool_programs` may do to tensors: operations, views and changes in place.

Each takes the program's random numbers and tensors; what does not fit raises, in a plain run as in one with a
spool.
"""

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

Tensors = Sequence[torch.Tensor]


class Squared(torch.autograd.Function):
    """Saves its input, its output and a value of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * x
        ctx.save_for_backward(x, y, torch.full_like(x, 2.0))
        return y

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch calls it
        ctx: Any, grad: torch.Tensor
    ) -> torch.Tensor:
        x, y, two = ctx.saved_tensors
        found: torch.Tensor = grad * two * x + 0 * y
        return found


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch calls it
        ctx: Any, grad: torch.Tensor
    ) -> torch.Tensor:
        raise ArithmeticError("the backward pass fails")


class DoublesInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        ctx.save_for_backward(x)
        return x

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride] - as torch calls it
        ctx: Any, grad: torch.Tensor
    ) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        found: torch.Tensor = grad * 2 + 0 * x
        return found


def matrix(x: torch.Tensor) -> torch.Tensor:
    """Return a well-conditioned square matrix made of a tensor."""
    flat = x.reshape(-1)
    side = max(1, min(8, int(flat.numel() ** 0.5)))
    square = flat[: side * side].reshape(side, side)
    return square / (1 + square.abs().max().detach()) + 2 * side * torch.eye(side, dtype=x.dtype)


def block(x: torch.Tensor) -> torch.Tensor:
    """Stand for a layer, to be computed again by checkpointing."""
    return (torch.tanh(x) * x.sigmoid()).exp() if not x.is_complex() else x * x.conj()


def _flat(x: torch.Tensor) -> torch.Tensor:
    return x.reshape(1, -1)


UNARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "exp": lambda x: (x / (1 + x.detach().abs())).exp(),
    "square": lambda x: x * x,
    "sqrt": lambda x: (x.abs() + 0.5).sqrt(),
    "pow": lambda x: x.abs().add(0.5).pow(1.5),
    "softmax": lambda x: x.softmax(-1),
    "log_softmax": lambda x: x.log_softmax(0),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
    "gelu": torch.nn.functional.gelu,
    "max": lambda x: x.max(-1).values,
    "sort": lambda x: x.sort(-1).values,
    "median": lambda x: x.contiguous().median(0).values,
    "cumprod": lambda x: (x / (1 + x.detach().abs())).cumprod(-1),
    "norm": lambda x: x.norm(dim=-1, keepdim=True) * x,
    "prod": lambda x: x.prod(-1),
    "gram": lambda x: _flat(x).mT @ _flat(x) if x.numel() <= 40 else x.clone(),
    "conv": lambda x: torch.nn.functional.conv1d(
        x.reshape(1, 1, -1), torch.full((1, 1, 1), 3.0, dtype=x.dtype)
    ),
    "pool": lambda x: torch.nn.functional.max_pool1d(x.reshape(1, 1, -1), 2),
    "bfloat16": lambda x: x.bfloat16() * x.bfloat16(),
    "double": lambda x: x.double() * x.double(),
    "complex": lambda x: torch.view_as_complex(torch.stack([x, x * x], -1)),
    "angle": lambda x: (x * x.conj()).abs(),
    "svd": lambda x: torch.linalg.svd(matrix(x), full_matrices=False)[1],
    "qr": lambda x: torch.linalg.qr(matrix(x))[1],
    "eigh": lambda x: torch.linalg.eigvalsh(matrix(x) + matrix(x).mH),
    "cholesky": lambda x: torch.linalg.cholesky(matrix(x) @ matrix(x).mH),
    "solve": lambda x: torch.linalg.solve(matrix(x), matrix(x)),
    "inverse": lambda x: torch.linalg.inv(matrix(x)),
    "custom": Squared.apply,
    "fails in backward": FailsInBackward.apply,
    "fails in forward": lambda x: (x * x).reshape(-1, 10**6 + 3),
    "checkpoint": lambda x: checkpoint(block, x, use_reentrant=False),
    "reentrant checkpoint": lambda x: checkpoint(block, x, use_reentrant=True),
    "square of detached": lambda x: x.detach() * x,
    "where": lambda x: torch.where(x.detach().real > 0, x * x, x),
    "masked_fill": lambda x: x.masked_fill(x.detach().abs() > 1, 0.5) * x,
    "clone": torch.clone,
}

BINARY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mul": torch.mul,
    "div": lambda x, y: x / (y.abs() + 1),
    "matmul": lambda x, y: (
        _flat(x)[:, : min(x.numel(), y.numel())] @ _flat(y)[:, : min(x.numel(), y.numel())].mT
    ),
    "outer": lambda x, y: x.reshape(-1)[:20].outer(y.reshape(-1)[:20]),
    "where": lambda x, y: torch.where(x.detach().real > y.detach().real, x * y, y),
    "atan2": torch.atan2,
    "addcmul": lambda x, y: torch.addcmul(x, y, y),
    "cat": lambda x, y: torch.cat([x.reshape(-1), y.reshape(-1)]).square(),
}

VIEWS: dict[str, Callable[[random.Random, torch.Tensor], torch.Tensor]] = {
    "all": lambda _, x: x,
    "transpose": lambda _, x: x.mT if x.dim() > 1 else x,
    "flat": lambda _, x: x.view(-1),
    "narrow": lambda r, x: x.narrow(0, n := r.randrange(x.shape[0]), r.randint(1, x.shape[0] - n)),
    "step": lambda r, x: x[..., :: r.randint(1, 4)],
    "column": lambda r, x: x[..., r.randrange(x.shape[-1])],
    "row": lambda r, x: x[r.randrange(x.shape[0])],
    "expand": lambda r, x: x.unsqueeze(0).expand(r.randint(1, 3), *x.shape),
    "expand column": lambda r, x: x[..., :1].expand(*x.shape[:-1], r.randint(1, 40)),
    "unfold": lambda r, x: x.reshape(-1).unfold(0, min(3, x.numel()), r.randint(1, 2)),
    "as_strided": lambda r, x: x.as_strided((min(2, x.numel()),), (r.randint(0, 2),), 0),
    "diagonal": lambda _, x: x.diagonal() if x.dim() > 1 else x,
    "chunk": lambda r, x: r.choice(x.chunk(3, -1)),
    "unbind": lambda r, x: r.choice(x.unbind(0)),
    "empty": lambda _, x: x[:0],
    "scalar": lambda _, x: x.reshape(-1)[0],
    "conj": lambda _, x: x.conj(),
    "real": lambda _, x: x.real,
    "imag": lambda _, x: x.conj().imag if x.is_complex() else x,
    "pairs": lambda _, x: torch.view_as_real(x) if x.is_complex() else x,
    "detach": lambda _, x: x.detach(),
    "channels_last": lambda _, x: x.reshape(1, 2, 2, -1).contiguous(memory_format=torch.channels_last),
}

IN_PLACE: dict[str, Callable[[torch.Tensor], object]] = {
    "add_": lambda x: x.add_(1),
    "mul_": lambda x: x.mul_(0.5),
    "zero_": lambda x: x.zero_(),
    "relu_": torch.relu_,
    "tanh_": lambda x: x.tanh_(),
    "exp_": lambda x: x.clamp_(-2, 2).exp_(),
    "copy_": lambda x: x.copy_(x.detach() * 2),
    "square_": lambda x: x.mul_(x),
    "set first": lambda x: x.__setitem__(0, 0.25),
    "fill_": lambda x: x.fill_(0.5),
    "custom": DoublesInPlace.apply,
    "version alone": torch.autograd.graph.increment_version,
}
