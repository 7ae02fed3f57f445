"""Mistakes in the arguments of public functions: named in our own words, with a short traceback."""

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import trocar
from trocar import training
from trocar._base.delegation import explained


def public_functions() -> list[tuple[str, Callable[..., Any]]]:
    """Return the functions of both public modules, by their names."""
    return [
        (f"{module.__name__}.{name}", getattr(module, name))
        for module in (trocar, training)
        for name in module.__all__
        if inspect.isfunction(getattr(module, name)) and not takes_any_option(getattr(module, name))
    ]


def takes_any_option(function: Callable[..., Any]) -> bool:
    kinds = {each.kind for each in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds


@pytest.mark.parametrize(("name", "function"), public_functions())
def test_every_public_function_names_its_own_arguments(name: str, function: Callable[..., Any]) -> None:
    own = name.rpartition(".")[2]
    with pytest.raises(TypeError, match=f"^{own} has no argument 'nonsense'") as caught:
        function(nonsense=1)
    assert len(traceback.extract_tb(caught.value.__traceback__)) <= 2


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: trocar.loss("mse", target=[1]), "it is labels="),  # type: ignore[call-arg]
        (lambda: trocar.loss("mse", [1], weight=[1]), "class_weights="),  # type: ignore[call-arg]
        (lambda: training.lora(rank=4), "it is ranks="),  # type: ignore[call-arg]
        (lambda: trocar.audio([0.0]), "audio needs rate"),  # type: ignore[call-arg]
        (lambda: trocar.top_k("a"), "k is 'a'; give a whole number"),  # type: ignore[arg-type]
        (lambda: trocar.audio([0.0], "x"), "rate is 'x'; give a whole number"),  # type: ignore[arg-type]
        (lambda: trocar.histogram(3), "bins=3"),  # type: ignore[arg-type]
        (lambda: trocar.connect("gpu1", option=1), "did you mean options?"),  # type: ignore[call-arg]
        (lambda: trocar.connect("localhost", token=3), "token is int; give a text"),  # type: ignore[arg-type]
        (lambda: trocar.options(merge="x"), "merge is 'x'; give True or False"),  # type: ignore[arg-type]
        (lambda: trocar.options(timeout_s="x"), "give a number of seconds"),  # type: ignore[arg-type]
        (lambda: training.gradient_edit("fc", "zero_if", 1.0), "it takes options by name alone"),
    ],
)
def test_a_mistake_says_what_to_give(call: Callable[[], object], words: str) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: training.gradient_edit("fc", "clampp", -1, 1), "not 'clampp'; nearest: clamp"),
        (lambda: training.lora(0).to_wire(), "a rank is 0; it is at least 1"),
        (lambda: trocar.options(timeout_s=-1), "above 0"),
    ],
)
def test_a_wrong_value_is_refused_where_it_is_given(call: Callable[[], object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (training, "adamw2", "nearest: adamw"),
        (training, "clamp", "gradient_edit"),
        (trocar, "clamp", "trocar.training.gradient_edit"),
        (trocar, "tapp", "nearest: tap"),
        (trocar, "adamw", "it is trocar.training.adamw"),
        (trocar, "UnknownModuleError", "it is trocar.errors.UnknownModuleError"),
    ],
)
def test_an_unknown_name_of_a_module_has_the_nearest(module: Any, name: str, words: str) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert words in str(caught.value)


@pytest.mark.parametrize("name", ["features.pt", "features.npz", "features.safetensors"])
def test_a_folder_of_features_has_no_name_of_a_file(name: str, tmp_path: Path) -> None:
    client: Any = None
    with pytest.raises(trocar.errors.OutputError, match="is the name of a file"):
        trocar.extract_dataset(client, "m", "photos", ["fc"], tmp_path / name)


def test_a_defect_keeps_its_frames() -> None:
    @explained
    def broken(text: str) -> int:
        return int(text)

    with pytest.raises(ValueError, match="invalid literal") as caught:
        broken("x")
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"
