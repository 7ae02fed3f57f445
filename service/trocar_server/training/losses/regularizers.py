"""Penalties on weights, added to the loss."""

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from trocar_server.training.model.trained_parameters import NO_STAGES, Names, select_names
from trocar_server.training.spec.trainer_spec import RegularizerSpec


class Penalties:
    """Penalties whose selectors are resolved once.

        penalties = Penalties(spec.regularizers, trained, module)
        loss = loss + penalties()

    Args:
        specs: The penalties.
        named_parameters: The trained parameters by name; others are not penalised.
        module: The module tree, for selectors with classes; without it these match nothing.
        stages: Selectors by stage name.

    Raises:
        ServiceError: `UNKNOWN_PARAMETER` or `INVALID_SELECTOR`.
    """

    def __init__(
        self,
        specs: Sequence[RegularizerSpec],
        named_parameters: Mapping[str, Tensor],
        module: nn.Module | None = None,
        stages: Mapping[str, str] = NO_STAGES,
    ) -> None:
        names = Names.of_trained(named_parameters, module, stages)
        self._chosen: list[tuple[RegularizerSpec, list[Tensor]]] = []
        for index, spec in enumerate(specs):
            field = f"regularizers[{index}].parameters"
            result = select_names(names, spec.parameters, field)
            self._chosen.append((spec, [named_parameters[n] for n in result if n in named_parameters]))

    def __call__(self) -> Tensor | None:
        """Return the sum over penalties of weight * sum of norms, over parameters in order."""
        total: Tensor | None = None
        for spec, parameters in self._chosen:
            term: Tensor | None = None
            for parameter in parameters:
                norm = parameter.abs().sum() if spec.norm == "l1" else parameter.square().sum()
                term = norm if term is None else term + norm
            if term is not None:
                total = term * spec.weight if total is None else total + term * spec.weight
        return total


def penalty(
    specs: Sequence[RegularizerSpec],
    named_parameters: Mapping[str, Tensor],
    module: nn.Module | None = None,
) -> Tensor | None:
    """Return the penalties of parameters, None without; see `Penalties`, which is faster in a loop."""
    return Penalties(specs, named_parameters, module)()
