"""Trainer spec, as a client sends it. Fields are validated here; `checks` compares them with the model.

The fields are those of `trainer.proto`, by the same names, so that a message becomes a spec without special
code. Losses, optimizers, schedules and rules are selected by name, because their options are torch's own and
are given by name, too.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Option = bool | int | float | str | list[float] | list[str] | None
"""The value of a torch option; integers are ints."""
Options = dict[str, Option]
"""Options by name, as torch calls them."""
Selectors = tuple[str, ...]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class SpecPart(BaseModel):
    """Part of a spec: frozen, without unknown fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadSpec(SpecPart):
    """The new classifier."""

    path: str = ""
    """The module that it replaces; detected when empty."""
    classes: int = Field(default=0, ge=1, le=1_000_000)
    """Number of its outputs."""
    hidden: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = ()
    """Widths of hidden layers, each followed by a ReLU; empty for a single Linear."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout before each Linear."""
    init: Literal["default", "zeros", "normal", "xavier", "kaiming"] = "default"
    """Initial weights: torch's default, zeros, normal with standard deviation 0.01, or Xavier or Kaiming
    uniform. Except with `default`, biases start at zero."""
    bias: bool = True
    """Whether its layers have biases."""
    of: Literal["", "sentence", "tokens"] = ""
    """What a head is added for behind a model of texts, which returns `logits` then: whole texts or tokens;
    a classifier is replaced when empty."""


class LoraRankSpec(SpecPart):
    """Rank of an adapter in some modules."""

    selector: str
    """Pattern of module paths: `*` is any text, dots included; without one the last components of a path."""
    rank: Annotated[int, Field(ge=1, le=8192)]
    """Rank of the update."""
    alpha: Positive | None = None
    """Scale of these, in place of the adapter's."""


class LoraSpec(SpecPart):
    """A LoRA adapter, made by PEFT."""

    ranks: tuple[LoraRankSpec, ...] = ()
    """Ranks by pattern; a module has that of the first pattern that matches."""
    alpha: Positive = 8.0
    """The update is multiplied by alpha / rank."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout before the adapter."""
    use_rslora: bool = False
    """Whether the update is multiplied by alpha / sqrt(rank) instead."""
    name: str = Field(default="", pattern=r"^[A-Za-z0-9._-]{0,64}$")
    """What calls of its owner call it; none when empty."""


class TeacherSpec(SpecPart):
    """A value of another hosted model on the same inputs."""

    model_id: str
    """The id of a loaded model; it stays in eval mode and gets no gradients."""
    selector: str = ""
    """The value; the model's output when empty."""


class LossSpec(SpecPart):
    """One term of the loss."""

    name: Literal[
        "cross_entropy",
        "bce_with_logits",
        "mse",
        "l1",
        "huber",
        "kl_div",
        "l1_norm",
        "l2_norm",
        "token_cross_entropy",
        "causal_lm",
        "policy_gradient",
        "contrastive",
        "contrastive_logits",
    ]
    """torch's loss; `l1_norm` and `l2_norm` are the mean absolute and the mean squared value, without a
    target. `token_cross_entropy`, `causal_lm` and `policy_gradient` take logits (batch, tokens, classes),
    `contrastive` vectors whose halves are pairs, `contrastive_logits` scores (n, n): see `tensors.losses`."""
    weight: Finite = 1.0
    """Factor in the sum."""
    selector: str = ""
    """The value that it applies to: the model's output when empty, else a value of the pass, `layer4` or
    `layer4/in`."""
    target: str = ""
    """Name of the batch's target to compare with; the only one when empty."""
    teacher: TeacherSpec | None = None
    """A teacher to compare with instead of a target. With `kl_div` both are logits, divided by the option
    `temperature`; the loss is multiplied by its square."""
    options: Options = {}
    """torch's own: `label_smoothing`, `ignore_index`, `pos_weight`, `delta`, ...; `class_weights` (a list) is
    its `weight`."""


class RegularizerSpec(SpecPart):
    """A penalty on weights, added to the loss."""

    parameters: Selectors
    """The penalised parameters."""
    norm: Literal["l1", "l2"] = "l2"
    """Sum of absolute values, or of squares."""
    weight: Finite = 1.0
    """Factor."""


class ParameterGroupSpec(SpecPart):
    """Parameters with their own options. A parameter belongs to the first group that names it."""

    parameters: Selectors
    """Parameters of the group."""
    options: Options = {}
    """Options that differ from the optimizer's."""


class OptimizerSpec(SpecPart):
    """An optimizer of `torch.optim`."""

    name: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"] = "sgd"
    """The optimizer."""
    options: Options = {"lr": 0.01}
    """torch's own."""
    groups: tuple[ParameterGroupSpec, ...] = ()
    """Parameters with other options; the remaining ones form a last group."""
    in_backward: bool = False
    """Whether to update each parameter, and free its gradient, as soon as the gradient is complete."""


class ScheduleSpec(SpecPart):
    """Schedule of the learning rates."""

    name: Literal["constant", "step", "cosine", "one_cycle", "plateau"] = "constant"
    """`StepLR`, `CosineAnnealingLR`, `OneCycleLR`, `ReduceLROnPlateau` of torch."""
    options: Options = {}
    """torch's own. `T_max` and `total_steps` are filled in by `fit` if they are missing."""
    per: Literal["step", "epoch"] = "step"
    """Unit of the schedule. `fit` counts epochs; a plateau counts its evaluations."""
    warmup: int = Field(default=0, ge=0)
    """Steps (or epochs) of a linear warm-up before the schedule (`LinearLR`, `SequentialLR`)."""
    warmup_start: float = Field(default=0.01, gt=0, le=1)
    """Initial factor of the warm-up."""


class GradientEditSpec(SpecPart):
    """A declared change to gradients; rules apply in the order of the list."""

    selector: str
    """Parameters (`fc.*`, `layer4`, `fc.bias`), or the gradient at a value of the pass
    (`layer4/grad_out`)."""
    name: Literal["clamp", "scale", "zero", "noise", "nan_to_num", "normalise", "clip_norm_of_all", "zero_if"]
    """`clamp` (`low`, `high`), `scale` (`factor`), `zero`, `noise` (`scale`), `nan_to_num` (`nan`, `posinf`,
    `neginf`), `normalise` (`max_norm`: the maximum Euclidean norm of each tensor). Over the set of all
    selected parameters: `clip_norm_of_all` (`max_norm`: the maximum norm of all together), `zero_if`
    (`above`, `below`: that norm; `nonfinite`: true; `mode`: `all` or `any`)."""
    options: Options = {}
    """Options as listed above."""
    selectors: Selectors = ()
    """Additional parameters of the set, or of the rule."""
    when: Literal["batch", "accumulated"] = "batch"
    """Applies to the gradients of each backward pass, or to the sum after each: parameters only."""


class ValueEditSpec(SpecPart):
    """An edit with a stored direction, made in training passes.

    It has the direction as it was when the trainer was created, which may be deleted or replaced since.
    """

    selector: str
    """The value: the place at which the direction was fitted."""
    name: Literal["steer", "project_out", "cap"]
    """The operation."""
    options: Options = {}
    """Its options, beside its vectors."""
    channel_dim: int | None = None
    """The dimension of the channels; that of the value's layout when None."""
    shape: tuple[Annotated[int, Field(ge=1)], ...]
    """Shape of the vectors: (channels,), or (vectors, channels)."""
    vectors: str
    """Their numbers in float64, little-endian, in base64."""
    sent: str
    """The edit as its client sent it: an `Edit`, serialised, in base64."""


class SavedTensorsSpec(SpecPart):
    """Storage of the tensors that autograd saves for the backward pass."""

    store: Literal["none", "host", "spool"] = "none"
    """On the device as usual, in host memory, or in memory within a budget and beyond it on disk."""
    budget_bytes: int = Field(default=256 << 20, ge=0)
    """Spool: bytes in memory."""
    modules: Selectors = ()
    """Spool: only tensors saved by these modules; all when empty."""
    min_bytes: int = Field(default=32 << 10, ge=0)
    """Spool: smaller tensors are left in place."""
    store_dtype: Literal["", "bf16", "int8"] = ""
    """Spool: lower precision on disk; exact when empty."""
    device_bytes: int = Field(default=0, ge=0)
    """Spool: bytes of a forward pass that stay on a GPU, those that it saves last; not used on a CPU."""


class TrainerSpec(SpecPart):
    """A trainer."""

    model_id: str
    """Id of the base model."""
    head: HeadSpec | None = None
    """A new classifier; the model's own when None."""
    trainable: Selectors = ()
    """Trained modules (all of their parameters) or parameters; all when empty. A new head is always
    trained."""
    train_mode: Selectors = ()
    """Modules in train mode though they have no trained parameters, batch norm for example; see `modes`."""
    losses: tuple[LossSpec, ...] = (LossSpec(name="cross_entropy"),)
    """Terms of the loss."""
    regularizers: tuple[RegularizerSpec, ...] = ()
    """Penalties on weights."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """The optimizer."""
    schedule: ScheduleSpec = ScheduleSpec()
    """The learning rate schedule."""
    gradient_edits: tuple[GradientEditSpec, ...] = ()
    """Changes to gradients, before they are accumulated."""
    edits: tuple[ValueEditSpec, ...] = ()
    """Changes to values in training passes, in this order; no other pass of the trainer has them."""
    clip_norm: Positive | None = None
    """The maximum norm of all gradients together, after the rules, before the update (`clip_grad_norm_`)."""
    accumulation: int = Field(default=1, ge=1, le=65536)
    """Batches per update; each contributes its share."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16`: `torch.autocast` with bfloat16."""
    activation_checkpointing: Selectors = ()
    """Modules recomputed in the backward pass instead of saving their activations."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keeps a moving average of the trained parameters: decay * average + (1 - decay) * weight after each
    update. Evaluation, extraction, export and publishing use it."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The head is created after `torch.manual_seed(seed)`; it also seeds the random numbers of steps."""
    deterministic: bool = False
    """Whether steps run with `torch.use_deterministic_algorithms`."""
    on_nonfinite: Literal["fail", "skip"] = "fail"
    """Handling of a step with a non-finite loss or gradient; either way it is rolled back."""
    saved_tensors: SavedTensorsSpec = SavedTensorsSpec()
    """Storage of saved tensors."""
    lora: LoraSpec | None = None
    """LoRA layers, which are trained in place of the model's parameters; none when None."""
    ttl_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Seconds after its last use until it is closed; 0 for the server's limit."""
