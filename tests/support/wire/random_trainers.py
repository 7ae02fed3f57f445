"""Messages that describe trainers and fits: mostly right, with something in them that may be wrong."""

from typing import Any

from google.protobuf.struct_pb2 import NULL_VALUE, ListValue, Struct, Value
from hypothesis import strategies as st

from trocar_api.v1 import edit_pb2, fit_pb2
from trocar_api.v1 import trainer_pb2 as pb

INT32 = st.sampled_from([0, 1, 2, -1, 7, 65_536, 1_000_000, -(1 << 31), (1 << 31) - 1])
INT64 = st.sampled_from([0, 1, 2, -1, 1 << 31, 1 << 53, -(1 << 63), (1 << 63) - 1])
DOUBLE = st.sampled_from(
    [0.0, 1.0, 0.1, 0.9, -1.0, 1e-310, 1e300, -1e300, float("nan"), float("inf"), -float("inf")]
)
TEXT = st.sampled_from(
    [
        "",
        "fc",
        "conv",
        "**",
        "norm.weight",
        "tiny",
        "\x00",
        "fc/grad_out",
        "/out",
        "é" * 300,
        "[",
        "(" * 99,
        "../x",
    ]
)
KEYS = st.sampled_from(
    [
        "lr",
        "momentum",
        "betas",
        "eps",
        "weight",
        "label_smoothing",
        "ignore_index",
        "low",
        "high",
        "factor",
        "scale",
        "max_norm",
        "gamma",
        "step_size",
        "T_max",
        "max_lr",
        "total_steps",
        "",
        "size",
        "p",
        "num_classes",
        "top_k",
        "self",
        "__class__",
    ]
)


def value(content: Any) -> Value:
    """Make a value, also of what JSON cannot hold."""
    if content is None:
        return Value(null_value=NULL_VALUE)
    if content == "nothing":
        return Value()
    if isinstance(content, bool):
        return Value(bool_value=content)
    if isinstance(content, float):
        return Value(number_value=content)
    if isinstance(content, str):
        return Value(string_value=content)
    if isinstance(content, list):
        return Value(list_value=ListValue(values=map(value, content)))
    return Value(struct_value=struct(content))


def struct(content: dict[str, Any]) -> Struct:
    return Struct(fields={name: value(entry) for name, entry in content.items()})


LEAVES = st.one_of(st.none(), st.booleans(), DOUBLE, TEXT, st.just("nothing"))
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=2), max_leaves=4
)
OPTIONS = st.dictionaries(KEYS, VALUES, max_size=3).map(struct)
TEXTS = st.lists(TEXT, max_size=3)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def name(*known: str) -> st.SearchStrategy[str]:
    return st.sampled_from([*known, known[0], known[0], "", "nonsense"])


HEADS = st.builds(
    pb.HeadSpec,
    path=maybe(TEXT),
    classes=INT32,
    hidden=st.lists(INT32, max_size=2),
    dropout=maybe(DOUBLE),
    init=maybe(name("default", "zeros", "kaiming")),
    bias=maybe(st.booleans()),
)
TEACHERS = st.builds(pb.TeacherSpec, model_id=TEXT, selector=maybe(TEXT))
LOSSES = st.builds(
    pb.LossSpec,
    name=name("cross_entropy", "mse", "bce_with_logits", "huber", "kl_div", "l2_norm"),
    weight=maybe(DOUBLE),
    selector=maybe(TEXT),
    target=maybe(TEXT),
    teacher=maybe(TEACHERS),
    options=maybe(OPTIONS),
)
GROUPS = st.builds(pb.ParameterGroupSpec, parameters=TEXTS, options=maybe(OPTIONS))
OPTIMIZERS = st.builds(
    pb.OptimizerSpec,
    name=maybe(name("sgd", "adam", "adamw", "lbfgs", "rmsprop", "adagrad")),
    options=maybe(OPTIONS),
    groups=st.lists(GROUPS, max_size=2),
    in_backward=maybe(st.booleans()),
)
SCHEDULES = st.builds(
    pb.ScheduleSpec,
    name=maybe(name("constant", "step", "cosine", "one_cycle", "plateau")),
    options=maybe(OPTIONS),
    per=maybe(name("step", "epoch")),
    warmup=maybe(INT32),
    warmup_start=maybe(DOUBLE),
)
RULES = st.builds(
    pb.GradientEditSpec,
    selector=TEXT,
    name=name("clamp", "scale", "noise", "normalise", "zero"),
    options=maybe(OPTIONS),
)
DIRECTIONS: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.builds(
        edit_pb2.DirectionSteer, alpha=maybe(DOUBLE), keeps_norm=st.booleans(), is_relative=st.booleans()
    ).map(lambda message: {"steer": message}),
    st.builds(edit_pb2.DirectionCap, low=maybe(DOUBLE), high=maybe(DOUBLE)).map(
        lambda message: {"cap": message}
    ),
    st.just({"project_out": True}),
    st.just({}),
)
EDITS = st.builds(
    lambda selector, kind, channel_dim, units, named: edit_pb2.Edit(
        selector=selector,
        channel_dim=channel_dim,
        direction=edit_pb2.DirectionEdit(name=named, units=units, **kind),
    ),
    st.sampled_from(["conv", "conv", "conv", "fc/in", "**", "", "conv/grad_out", "("]),
    DIRECTIONS,
    st.sampled_from([None, None, None, 1, 0, -7, 1 << 30]),
    st.sampled_from([0, 1, 2, 9]),
    st.sampled_from(["axis", "axis", "axis", "", "no", "../x"]),
)
"""Of the direction `axis`, at `conv`, if there is one."""
SAVED = st.builds(
    pb.SavedTensorsSpec,
    store=maybe(name("none", "host", "spool")),
    budget_bytes=maybe(INT64),
    modules=TEXTS,
    min_bytes=maybe(INT64),
    store_dtype=maybe(name("", "bf16", "int8")),
    device_bytes=maybe(INT64),
)
PENALTIES = st.builds(
    pb.RegularizerSpec, parameters=TEXTS, norm=maybe(name("l1", "l2")), weight=maybe(DOUBLE)
)
SPECS: dict[str, st.SearchStrategy[Any]] = {
    "head": HEADS,
    "trainable": TEXTS,
    "train_mode": TEXTS,
    "losses": st.lists(LOSSES, max_size=2),
    "regularizers": st.lists(PENALTIES, max_size=2),
    "optimizer": OPTIMIZERS,
    "schedule": SCHEDULES,
    "gradient_edits": st.lists(RULES, max_size=2),
    "edits": st.lists(EDITS, max_size=2),
    "clip_norm": DOUBLE,
    "accumulation": INT32,
    "precision": name("float32", "bf16"),
    "activation_checkpointing": TEXTS,
    "ema_decay": DOUBLE,
    "seed": INT64,
    "deterministic": st.booleans(),
    "on_nonfinite": name("fail", "skip"),
    "saved_tensors": SAVED,
    "ttl_s": DOUBLE,
}


@st.composite
def specs(draw: st.DrawFn) -> pb.TrainerSpec:
    """A right spec with one to three fields that may be wrong."""
    chosen = draw(st.lists(st.sampled_from(sorted(SPECS)), max_size=3, unique=True))
    model_id = draw(st.sampled_from(["tiny"] * 9 + ["", "no", "\x00"]))
    return pb.TrainerSpec(model_id=model_id, **{field: draw(SPECS[field]) for field in chosen})


METRICS = st.builds(
    fit_pb2.MetricSpec,
    name=name("accuracy", "top_k", "f1", "auroc", "confusion_matrix", "mean_iou"),
    options=maybe(OPTIONS),
)
AUGMENTS = st.builds(
    fit_pb2.AugmentationSpec,
    name=name("RandomHorizontalFlip", "RandomCrop", "ColorJitter", "Normalize", "Lambda"),
    options=maybe(OPTIONS),
)
STOPS = st.builds(
    fit_pb2.EarlyStopSpec,
    metric=maybe(name("loss", "accuracy")),
    patience=maybe(INT32),
    min_delta=maybe(DOUBLE),
    is_higher_better=maybe(st.booleans()),
)
CACHES = st.builds(
    fit_pb2.FeatureCacheSpec,
    mode=maybe(name("auto", "off")),
    memory_bytes=maybe(INT64),
    disk_bytes=maybe(INT64),
)
FITS: dict[str, st.SearchStrategy[Any]] = {
    "epochs": st.sampled_from([0, 1, 2, -1, 1 << 30]),
    "batch_size": INT32,
    "shuffle": st.booleans(),
    "drop_last": st.booleans(),
    "metrics": st.lists(METRICS, max_size=2),
    "augmentations": st.lists(AUGMENTS, max_size=2),
    "early_stop": STOPS,
    "checkpoint_every": INT32,
    "feature_cache": CACHES,
}
