"""What a trainer is made of, as a client says it: checked for form here, against the model in `checking`.

The fields are those of `trainer.proto`, by the same names, so that a message becomes a spec without code of
its own. Names of losses, optimizers, schedules and rules are texts, because their options are torch's own and
are given by name, too.
"""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Option = bool | int | float | str | list[float] | list[str] | None
"""The value of an option of torch; whole numbers are ints."""
Options = dict[str, Option]
"""Options by name, as torch calls them."""
Selectors = tuple[str, ...]

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Part(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class HeadSpec(_Part):
    """The new classifier."""

    path: str = ""
    """The module that it takes the place of; found by itself when empty."""
    classes: int = Field(default=0, ge=1, le=1_000_000)
    """Its outputs."""
    hidden: tuple[Annotated[int, Field(ge=1, le=1_000_000)], ...] = ()
    """Widths of hidden layers, with a ReLU behind each; none is one Linear."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropout before each Linear."""
    init: Literal["default", "zeros", "normal", "xavier", "kaiming"] = "default"
    """How weights begin: torch's own way, zeros, normal with deviation 0.01, or uniform after Xavier or
    Kaiming. With
    all but the first, biases begin with zeros."""
    bias: bool = True
    """Whether its layers have biases."""


class TeacherSpec(_Part):
    """A value of another hosted model, on the same inputs."""

    model_id: str
    """The id of a loaded model; it stays in eval mode and gets no gradients."""
    selector: str = ""
    """Which value; its output when empty."""


class LossSpec(_Part):
    """One term of the loss."""

    name: Literal["cross_entropy", "bce_with_logits", "mse", "l1", "huber", "kl_div", "l1_norm", "l2_norm"]
    """torch's loss; `l1_norm` and `l2_norm` are the mean absolute and the mean squared value, without a
    target."""
    weight: Finite = 1.0
    """Factor in the sum."""
    selector: str = ""
    """The value that it is of: the model's output when empty, else a value of the pass, `layer4` or
    `layer4/in`."""
    target: str = ""
    """Which of the batch's targets it is compared with; the only one when empty."""
    teacher: TeacherSpec | None = None
    """Compared with this instead of a target. With `kl_div` both are logits, divided by the option
    `temperature`; the loss
    is multiplied by its square."""
    options: Options = {}
    """torch's own: `label_smoothing`, `weight` (of the classes, a list), `ignore_index`, `pos_weight`,
    `delta`, ..."""


class RegularizerSpec(_Part):
    """A penalty on weights, added to the loss."""

    parameters: Selectors
    """Which."""
    norm: Literal["l1", "l2"] = "l2"
    """Sum of absolute values, or of squares."""
    weight: Finite = 1.0
    """Factor."""


class ParameterGroupSpec(_Part):
    """Parameters with options of their own. The first group that names a parameter has it."""

    parameters: Selectors
    """Which."""
    options: Options = {}
    """What differs from the optimizer's options."""


class OptimizerSpec(_Part):
    """An optimizer of `torch.optim`."""

    name: Literal["sgd", "adam", "adamw", "rmsprop", "adagrad", "lbfgs"] = "sgd"
    """Which."""
    options: Options = {"lr": 0.01}
    """torch's own."""
    groups: tuple[ParameterGroupSpec, ...] = ()
    """Parameters with other options; what no group names comes last, in one group."""
    in_backward: bool = False
    """Whether each parameter is updated, and its gradient freed, as soon as that is complete."""


class ScheduleSpec(_Part):
    """How the learning rates change."""

    name: Literal["constant", "step", "cosine", "one_cycle", "plateau"] = "constant"
    """`StepLR`, `CosineAnnealingLR`, `OneCycleLR`, `ReduceLROnPlateau` of torch."""
    options: Options = {}
    """torch's own. `T_max` and `total_steps` are filled in by `fit` where they are not given."""
    per: Literal["step", "epoch"] = "step"
    """After what they change. Epochs are counted by `fit`, plateaus by its evaluations."""
    warmup: int = Field(default=0, ge=0)
    """Steps (or epochs) of a linear warm-up before it (`LinearLR`, `SequentialLR`)."""
    warmup_start: float = Field(default=0.01, gt=0, le=1)
    """The factor that the warm-up begins with."""


class GradientRuleSpec(_Part):
    """A declared change to gradients, in the order of the list."""

    selector: str
    """Parameters (`fc.*`, `layer4`, `fc.bias`), or the gradient at a value of the pass
    (`layer4/grad_out`)."""
    name: Literal["clamp", "scale", "zero", "noise", "nan_to_num", "norm_limit"]
    """`clamp` (`low`, `high`), `scale` (`factor`), `zero`, `noise` (`std`), `nan_to_num` (`nan`, `posinf`,
    `neginf`),
    `norm_limit` (`limit`: the most Euclidean norm of each tensor)."""
    options: Options = {}
    """As said there."""


class SavedTensorsSpec(_Part):
    """Where what autograd saves for the backward pass lies."""

    store: Literal["none", "host", "spool"] = "none"
    """On the device as usual, in the host's memory, or within a budget in memory and else on disk."""
    budget_bytes: int = Field(default=256 << 20, ge=0)
    """Of the spool: bytes in memory."""
    modules: Selectors = ()
    """Of the spool: only what these modules save; all when empty."""
    min_bytes: int = Field(default=32 << 10, ge=0)
    """Of the spool: smaller tensors stay."""
    store_dtype: Literal["", "bf16", "int8"] = ""
    """Of the spool: less precise on disk; exact when empty."""


class TrainerSpec(_Part):
    """A trainer."""

    model_id: str
    """The hosted model that it begins with."""
    head: HeadSpec | None = None
    """A new classifier; the model's own when None."""
    trainable: Selectors = ()
    """What is trained: modules (all of their parameters) or parameters; everything when empty. A new head
    always is."""
    train_mode: Selectors = ()
    """Modules that are in train mode though they hold nothing trainable, batch norm for example; see
    `modes`."""
    losses: tuple[LossSpec, ...] = (LossSpec(name="cross_entropy"),)
    """Terms of the loss."""
    regularizers: tuple[RegularizerSpec, ...] = ()
    """Penalties on weights."""
    optimizer: OptimizerSpec = OptimizerSpec()
    """How weights change."""
    schedule: ScheduleSpec = ScheduleSpec()
    """How learning rates change."""
    gradient_rules: tuple[GradientRuleSpec, ...] = ()
    """What is done to gradients, before they are accumulated."""
    clip_norm: Positive | None = None
    """The most norm of all gradients together, after the rules, before the update (`clip_grad_norm_`)."""
    accumulation: int = Field(default=1, ge=1, le=65536)
    """Batches for each update; each counts for its share."""
    precision: Literal["float32", "bf16"] = "float32"
    """`bf16`: `torch.autocast` with bfloat16."""
    activation_checkpointing: Selectors = ()
    """Modules that are computed again in the backward pass instead of saved."""
    ema_decay: float | None = Field(default=None, gt=0, lt=1)
    """Keeps a moving average of what is trained: decay * average + (1 - decay) * weight after each update.
    Evaluation, extraction, export and publishing use it."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """The head is made after `torch.manual_seed(seed)`; the random numbers of the steps begin with it,
    too."""
    deterministic: bool = False
    """Whether `torch.use_deterministic_algorithms` holds in steps."""
    on_nonfinite: Literal["fail", "skip"] = "fail"
    """What becomes of a step whose loss or gradients are not finite: either way all is as before it."""
    saved_tensors: SavedTensorsSpec = SavedTensorsSpec()
    """Where saved tensors lie."""
    ttl_s: float = Field(default=0, ge=0, allow_inf_nan=False)
    """Seconds after its last use at which it is closed; 0 for the server's own limit."""
