"""A trainer's own tree of modules: new head, what is trained, modes."""

from collections.abc import Callable

from torch import nn

from trocar_server.models import HostedModel, make_hosted_copy, make_training_copy, stages_for
from trocar_server.surgery import Recording
from trocar_server.training.head import replace_head
from trocar_server.training.modes import set_modes
from trocar_server.training.parameters import trained_parameters
from trocar_server.training.spec import TrainerSpec


def make_tree(
    base: HostedModel, spec: TrainerSpec, record: Callable[[], Recording]
) -> tuple[nn.Module, tuple[str, ...]]:
    """Return the tree and the names of its trained parameters, in the order of `named_parameters`.

    Trained parameters and all buffers have memory of their own, frozen parameters have the base's. The base
    is left as it is.

    Args:
        base: What it begins with.
        spec: The trainer's.
        record: Gives a recorded pass of the base; called only where there is a new head.

    Raises:
        ServiceError: `TRAINER_INVALID`, `UNKNOWN_PARAMETER`, `UNKNOWN_MODULE` or `INVALID_SELECTOR`.
    """
    tree, head = make_hosted_copy(base.module), None
    if spec.head is not None:
        head = replace_head(tree, spec.head, spec.seed, record())
    stages = stages_for(base.spec)
    trained = trained_parameters(tree, spec.trainable, head, stages)
    parameters = dict(tree.named_parameters())
    module = make_training_copy(tree, [parameters[name] for name in trained])
    set_modes(module, trained, spec.train_mode, stages)
    return module, trained
