"""Module trees of a trainer: the trained one, and the hosted view over its memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import chain

from torch import Tensor, nn

from trocar_server.engine.host.repeatable import written_by
from trocar_server.models import HostedModel, Pristine, make_hosted_copy, make_training_copy, stages_for
from trocar_server.models.hosted import count_bytes
from trocar_server.surgery import Recording
from trocar_server.surgery.recording.recording import all_tensors
from trocar_server.training.model.head import replace_head
from trocar_server.training.model.lora import add_lora, lora_names
from trocar_server.training.model.modes import set_modes
from trocar_server.training.model.trained_parameters import trained_parameters
from trocar_server.training.spec.trainer_spec import TrainerSpec


def make_tree(
    base: HostedModel, spec: TrainerSpec, record: Callable[[], Recording]
) -> tuple[nn.Module, tuple[str, ...], str, frozenset[str]]:
    """Return the tree, the names of its trained parameters in order, the path of its new head, and `written`.

    These are the names of the parameters that its passes write to, and of the buffers that passes of the base
    write to: statistics of norms that are trained move the trainer's own, as they should. Trained parameters,
    all buffers and what passes write to are copies; the other frozen parameters share the base's memory.
    Embeddings with sparse gradients get dense ones. The base is not changed.

    Args:
        base: The base model.
        spec: The trainer's spec.
        record: Returns a recorded pass of the base; called only if there is a new head.

    Raises:
        ServiceError: `TRAINER_INVALID`, `UNKNOWN_PARAMETER`, `UNKNOWN_MODULE` or `INVALID_SELECTOR`.
    """
    tree, head = make_hosted_copy(base.module), None
    kept = _kept_in_train_mode(base)
    known = all_tensors(tree)
    written = {id(known[name]) for name in base.pristine.written}
    if spec.head is not None:
        head = replace_head(tree, spec.head, spec.seed, record())
    if spec.lora is not None:
        add_lora(tree, spec.lora, spec.seed, head or "")
    stages = stages_for(base)
    trained = trained_names(tree, spec, head, stages)
    parameters = dict(tree.named_parameters())
    module = make_training_copy(tree, [parameters[name] for name in trained])
    set_modes(module, trained, spec.train_mode, stages)
    for path, part in module.named_modules():
        part.training = part.training or path in kept
    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag):
            part.sparse = False  # most optimizers, averages over workers and checkpoints need dense gradients
    names = {name for name, tensor in all_tensors(tree).items() if id(tensor) in written}
    own = dict(module.named_parameters(remove_duplicate=False))
    names |= written_by(module, base) & own.keys()
    for name in names & own.keys() - set(trained):
        own[name].data = own[name].detach().clone()
    return module, trained, head or "", frozenset(names)


def _kept_in_train_mode(base: HostedModel) -> frozenset[str]:
    """Return the paths of the modules that the model's author keeps in train mode, also in evaluation."""
    return frozenset(path for path, part in base.module.named_modules() if part.training)


def trained_names(
    module: nn.Module, spec: TrainerSpec, head: str | None, stages: Mapping[str, str]
) -> tuple[str, ...]:
    """Return the names of the trained parameters: with an adapter, its own and a new head's.

    Raises:
        ServiceError: See `select_parameters`.
    """
    if spec.lora is None:
        return trained_parameters(module, spec.trainable, head, stages)
    adapters, inside = set(lora_names(module)), None if head is None else f"{head}."
    return tuple(
        name
        for name, _ in module.named_parameters()
        if name in adapters or (inside is not None and name.startswith(inside))
    )


def hosted_view(
    base: HostedModel,
    module: nn.Module,
    spec: TrainerSpec,
    averages: Mapping[str, Tensor] | None,
    written: Iterable[str] = (),
) -> HostedModel:
    """Return a model in eval mode that shares a trainer's memory, so that it follows its steps.

    Args:
        base: The base model, whose preprocessing and input shape are used.
        module: The trainer's module tree.
        spec: The trainer's spec. A new head has no class names, so they are `class 0` and so on.
        averages: Moving averages by parameter, used in place of the weights.
        written: Names of the parameters and buffers that passes write to.
    """
    shown = make_hosted_copy(module)
    kept = _kept_in_train_mode(base)
    for path, part in shown.named_modules():
        part.training = path in kept  # not `eval()`: some modules change their weights in it
    for name, parameter in shown.named_parameters():
        if averages is not None and name in averages:
            parameter.data = averages[name]
    categories = base.categories
    if spec.head is not None:
        categories = tuple(f"class {index}" for index in range(spec.head.classes))
    return replace(
        base,
        module=shown,
        categories=categories,
        parameter_count=sum(parameter.numel() for parameter in shown.parameters()),
        byte_count=count_bytes(chain(shown.parameters(), shown.buffers())),
        known_pristine=Pristine(
            shown,
            written,
            is_stateful=base.pristine.is_stateful or base.pristine.keeps_tensors,
            copies_parameters=averages is None,
        ),
    )
