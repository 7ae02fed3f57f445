"""Incompatible parts of a trainer's spec, each valid by itself."""

from trocar_server.surgery.sessions.gradient_sets import SETS
from trocar_server.training.spec.problems import Problems
from trocar_server.training.spec.trainer_spec import TrainerSpec

_MOST_PARTS = 256
_MOST_SELECTORS = 4096


def count_problems(spec: TrainerSpec, problems: Problems) -> None:
    """Collect the lists that are too long to check."""
    lists: dict[str, tuple[object, ...]] = {
        "losses": spec.losses,
        "regularizers": spec.regularizers,
        "gradient_edits": spec.gradient_edits,
        "edits": spec.edits,
        "optimizer.groups": spec.optimizer.groups,
        "head.hidden": spec.head.hidden if spec.head is not None else (),
    }
    for field, parts in lists.items():
        if len(parts) > _MOST_PARTS:
            problems.add(field, f"has {len(parts)} entries; the most is {_MOST_PARTS}")
    selected: dict[str, tuple[str, ...]] = {
        "trainable": spec.trainable,
        "train_mode": spec.train_mode,
        "activation_checkpointing": spec.activation_checkpointing,
        "saved_tensors.modules": spec.saved_tensors.modules,
        "regularizers": tuple(text for part in spec.regularizers for text in part.parameters),
        "optimizer.groups": tuple(text for part in spec.optimizer.groups for text in part.parameters),
    }
    for field, selectors in selected.items():
        if len(selectors) > _MOST_SELECTORS:
            problems.add(
                field, f"has {len(selectors)} selectors; the most is {_MOST_SELECTORS}, use patterns"
            )


def combination_problems(spec: TrainerSpec, problems: Problems) -> None:
    """Collect the incompatible combinations."""
    if spec.optimizer.in_backward:
        _check_in_backward(spec, problems)
    if spec.optimizer.name == "lbfgs" and spec.accumulation > 1:
        problems.add(
            "accumulation", "lbfgs computes its loss several times in a step, of one batch; leave it 1"
        )
    saved = spec.saved_tensors
    if saved.store != "spool":
        for name in ("modules", "store_dtype", "device_bytes"):
            if getattr(saved, name):
                problems.add(
                    f"saved_tensors.{name}", f"only a spool has this option, and the store is '{saved.store}'"
                )
    if spec.lora is not None and spec.trainable:
        problems.add("trainable", "with an adapter, it and a new head are trained; leave `trainable` out")
    if spec.schedule.name == "one_cycle" and spec.schedule.warmup:
        problems.add("schedule.warmup", "one_cycle has a warm-up of its own: the option `pct_start`")
    if spec.head is not None and spec.head.of and spec.head.path:
        problems.add("head.of", "it adds a head, and `head.path` replaces one; leave one of them out")
    if spec.head is not None and spec.head.init == "zeros" and spec.head.hidden:
        problems.add("head.init", "hidden layers of zeros never learn; choose another `init`")


def _check_in_backward(spec: TrainerSpec, problems: Problems) -> None:
    field = "optimizer.in_backward"
    if spec.clip_norm is not None:
        problems.add(field, "`clip_norm` needs all gradients at once; remove one of the two settings")
    if spec.accumulation > 1:
        problems.add(
            field, "each gradient is used at once, so none can be accumulated; set `accumulation` to 1"
        )
    if any(rule.when == "accumulated" or rule.name in SETS for rule in spec.gradient_edits):
        problems.add(
            field,
            "rules over a set, and on accumulated gradients, need all gradients at once; remove one of "
            "the two settings",
        )
    if spec.optimizer.name == "lbfgs":
        problems.add(field, "lbfgs needs all gradients at once; choose another optimizer")
    if spec.on_nonfinite == "skip":
        problems.add(
            field,
            "weights are changed before all gradients are known, so no step can be skipped; set "
            "`on_nonfinite` to 'fail'",
        )
