"""PyTorch runner: batch norms folded, channels last, bfloat16 where the numerics allow it."""

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import nn

from trocar_server.engine.compiled.backends.folding import Pair, fold, without_taps_between
from trocar_server.engine.compiled.backends.recipe import Recipe
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.schedule.lease import Replica
from trocar_server.models import Pristine
from trocar_server.surgery import Collector, TapSession


class TorchRunner:
    """A pass on a converted copy of the model's module tree. Owner thread only.

    Args:
        tree: A copy of the model's tree, owned by this runner; its weights may be shared.
        recipe: The values wanted.
        pairs: Batch norms to fold; see `folding.find_pairs`.
        numerics: `FAST` or `BF16`.
    """

    engine = "torch"

    def __init__(self, tree: nn.Module, recipe: Recipe, pairs: Sequence[Pair], numerics: Numerics) -> None:
        self.numerics = numerics
        self._recipe = recipe
        fold(tree, without_taps_between(pairs, recipe))
        dtype = torch.bfloat16 if numerics is Numerics.BF16 else None
        self._own_dtype = _float_dtype(tree, recipe)
        # `to` on the tree would write into parameters that other trees share.
        self._replica = Replica(Pristine(_converted(tree, dtype)))
        self._dtype = dtype

    def run(
        self, arguments: Sequence[torch.Tensor], lent: Collection[str] = ()
    ) -> Mapping[str, torch.Tensor]:
        """Run one pass; the values are the caller's own."""
        args, kwargs = self._recipe.called([self._taken(argument) for argument in arguments])
        collector = Collector()
        passing = self._replica.passing()
        with passing as tree, torch.inference_mode(), TapSession(tree, self._recipe.targets, collector):
            tree(*args, **kwargs)
        return {name: self._returned(collector.values[name]) for name in self._recipe.names}

    def _taken(self, argument: torch.Tensor) -> torch.Tensor:
        dtype = self._dtype if argument.is_floating_point() else None
        is_image = argument.dim() == 4
        return argument.to(
            dtype=dtype, memory_format=torch.channels_last if is_image else torch.preserve_format
        )

    def _returned(self, value: torch.Tensor) -> torch.Tensor:
        is_cast = self._dtype is not None and value.dtype is self._dtype
        return value.to(self._own_dtype) if is_cast else value


def _float_dtype(tree: nn.Module, recipe: Recipe) -> torch.dtype:
    """Return a model's compute dtype: that of its weights, else of its arguments."""
    dtypes = [*(tensor.dtype for tensor in tree.parameters()), *(spec.dtype for spec in recipe.arguments)]
    return next((dtype for dtype in dtypes if dtype.is_floating_point), torch.float32)


def _converted(tree: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Replace a tree's weights by its own copies, in another layout and dtype."""
    for module in tree.modules():
        for tensors in (module._parameters, module._buffers):
            for name, tensor in tensors.items():
                if tensor is not None:
                    tensors[name] = _laid_out(tensor, dtype)  # type: ignore[assignment]
    return tree


def _laid_out(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    wanted = dtype if tensor.is_floating_point() else None
    laid = tensor.detach().to(dtype=wanted, memory_format=_layout(tensor))
    return nn.Parameter(laid, requires_grad=False) if isinstance(tensor, nn.Parameter) else laid


def _layout(tensor: torch.Tensor) -> torch.memory_format:
    return torch.channels_last if tensor.dim() == 4 else torch.preserve_format
