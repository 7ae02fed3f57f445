"""Argument mistakes: what is wrong with the arguments of a method or function, and what is meant."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from difflib import get_close_matches
from inspect import Parameter, Signature, signature
from numbers import Integral, Real
from typing import Any

_MEANT = {
    "target": ("of", "the class is of=trocar.logit(...)"),
    "target_class": ("of", "the class is of=trocar.logit(...)"),
    "class_index": ("of", "the class is of=trocar.logit(...)"),
    "layer": ("at", ""),
    "layers": ("taps", ""),
    "modules": ("taps", ""),
    "selectors": ("taps", ""),
    "lr": ("optimizer", "the rate is the optimizer's: optimizer=trocar.training.adamw(lr=...)"),
    "learning_rate": ("optimizer", "the rate is the optimizer's: optimizer=trocar.training.adamw(lr=...)"),
    "weight_decay": ("optimizer", "it is the optimizer's: optimizer=trocar.training.adamw(weight_decay=...)"),
    "num_classes": ("head", "the number of classes is head=..."),
    "classes": ("head", "the number of classes is head=..."),
    "epochs": ("accumulation", "epochs are an argument of `fit` of the trainer"),
    "batch": ("batch_size", ""),
    "timeout": ("timeout_s", ""),
    "model": ("model_id", ""),
    "x": ("inputs", ""),
    "images": ("inputs", ""),
    "interventions": ("edits", ""),
    "loss": ("losses", ""),
    "labels": ("targets", ""),
    "metrics": ("optimizer", "metrics are an argument of `fit` of the trainer"),
    "adapter": ("lora", "a new one is made with lora=trocar.training.lora(...)"),
    "ema": ("ema_decay", ""),
    "pos_weight": ("class_weights", ""),
    "weight": ("class_weights", "weights of the classes are class_weights="),
    "rank": ("ranks", ""),
    "r": ("ranks", ""),
    "precision": ("options", "options=trocar.options(numerics=...)"),
    **{
        name: ("options", f"options=trocar.options({name}=...)")
        for name in ("numerics", "merge", "cache", "priority", "wire", "chunk_bytes", "timeout_s")
    },
}
"""What other libraries call an argument: what it is here, if the method has that, and a hint."""
_ALSO_MEANT = {"target": "labels", "targets": "labels", "y": "targets", "layer": "taps", "batch": "inputs"}
"""The same, in other methods."""


def argument_hint(name: str, names: Iterable[str]) -> str:
    """Return a hint for an unknown argument: what is meant, else the nearest names, else all names."""
    known = list(names)
    for meant, hint in (_MEANT.get(name, ("", "")), (_ALSO_MEANT.get(name, ""), "")):
        if meant in known:
            return hint or f"it is {meant}="
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    return f"did you mean {' or '.join(near)}?" if near else f"available: {', '.join(known)}"


def argument_mistake(method: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]) -> str:
    """Return what is wrong with the arguments of a method; empty if they fit its signature.

    Args:
        method: A method; or a function, whose arguments are then all given.
        args: Arguments by position, without `self`.
        options: Arguments by name.
    """
    declared = signature(method)
    parameters = list(declared.parameters.values())
    if parameters and parameters[0].name == "self":
        parameters = parameters[1:]
        declared = declared.replace(parameters=parameters)
    try:
        given = declared.bind(*args, **options).arguments
    except TypeError as error:
        name = method.__name__
        wrong = next((given for given in options if given not in declared.parameters), None)
        if wrong is not None and not any(each.kind is Parameter.VAR_KEYWORD for each in parameters):
            known = [each.name for each in parameters if each.kind is not Parameter.POSITIONAL_ONLY]
            return f"{name} has no argument {wrong!r}; {argument_hint(wrong, known)}"
        by_position = [each.name for each in parameters if each.kind is Parameter.POSITIONAL_OR_KEYWORD]
        if len(args) > len(by_position) and not any(
            each.kind is Parameter.VAR_POSITIONAL for each in parameters
        ):
            return (
                f"{name} takes {len(by_position)} arguments by position ({', '.join(by_position)}); give the "
                "others by name"
            )
        required = [each.name for each in parameters if _is_required(each)]
        missing = [each for each in required[len(args) :] if each not in options]
        shown = [f"{each}=..." if _is_keyword(declared.parameters[each]) else each for each in missing]
        return f"{name} needs {' and '.join(shown)}" if missing else f"{name}: {error}"
    return _wrong_kind(declared, given)


_KINDS: Mapping[str, tuple[tuple[type, ...], str]] = {
    "str": ((str,), "give a text"),
    "int": ((Integral,), "give a whole number"),
    "float": ((Real,), "give a number"),
    "bool": ((bool,), "give True or False"),
}
"""Types of plain arguments by annotation, and what to give."""


def _wrong_kind(declared: Signature, given: Mapping[str, Any]) -> str:
    """Return which plain argument is of another type than its annotation says; empty if none is."""
    for name, value in given.items():
        annotation = declared.parameters[name].annotation
        words = getattr(annotation, "__name__", "") if isinstance(annotation, type) else str(annotation)
        kinds, cure = _KINDS.get(words.removesuffix(" | None"), ((), ""))
        is_unset = value is None and words.endswith(" | None")
        if kinds and not is_unset and not isinstance(value, kinds):
            own = getattr(value, "model_id", "") if name == "model_id" else ""
            hint = f", for example {own!r}" if own else ""
            return f"{name} is {value!r:.60}; {cure}{hint}"
    return ""


def _is_keyword(parameter: Parameter) -> bool:
    return parameter.kind is Parameter.KEYWORD_ONLY


def _is_required(parameter: Parameter) -> bool:
    kinds = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
    return parameter.default is Parameter.empty and parameter.kind not in kinds
