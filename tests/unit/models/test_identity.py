"""Identity of a model: every field, setting and file that decides values, and nothing else."""

# pyright: reportArgumentType=false

import dataclasses
import importlib.util
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.models.tiny_models import Plain
from trocar_server.config import EngineConfig, ImagesConfig
from trocar_server.decoding.pixels import Conversion
from trocar_server.models import HostedModel, ModelSpec, PreprocessingSpec, load_model
from trocar_server.models.identity import (
    BY_CONTENT,
    NOT_IDENTITY,
    NOT_SETTINGS,
    Content,
    Identity,
    content_of,
    digest_of,
    identity,
    settings_of,
    structure_of,
)
from trocar_server.models.spec import Merge, Rebuilding, WarmVariant
from trocar_server.storage.fingerprint import fingerprint

BASE = ModelSpec("net", "mine:Net", "random:0")
CHANGES: dict[str, Any] = {
    "model_id": "other",
    "architecture": "mine:Other",
    "weights": "random:1",
    "options": {"classes": 4},
    "arguments": (4,),
    "categories": ("a",),
    "preprocessing": PreprocessingSpec(resize=(9,)),
    "input_shape": (3, 8, 8),
    "stages": {"early": "first"},
    "factory": nn.ReLU,
    "numerics": "bf16",
    "rebuilding": Rebuilding("V1", "ab", nn.Module.eval),
    "source": "timm:net",
    "dtype": "bf16",
    "inputs": {"x": {"dtype": "float32"}},
    "processor_folder": Path("/tokens"),
    "warm_variants": (WarmVariant(("first",), "bf16"),),
    "merge": Merge.EVERYBODY,
}
OF_ENGINE = {"numerics": "bf16"}
CODE = """
from torch import nn
class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3, 3)
    def forward(self, x):
        return self.fc(x) * {factor}
"""


def of(spec: ModelSpec, **settings: Any) -> str:
    return identity(spec, settings_of(EngineConfig(**settings), Conversion()), Content()).digest


def hosted(weights: str = "random:0", **options: Any) -> HostedModel:
    name = f"{Plain.__module__}:{Plain.__qualname__}"
    spec = ModelSpec("tiny", name, weights, input_shape=(3, 8, 8), **options)
    return load_model(spec, torch.device("cpu"), Path("nowhere"))


def with_module(module: nn.Module) -> HostedModel:
    return replace(hosted(), module=module)


def identified(model: HostedModel) -> Identity:
    content = content_of(model, structure_of(model.module))
    tensors = fingerprint(model.module.state_dict())
    return identity(model.spec, {}, content).with_tensors(tensors, is_lasting=True)


def test_every_field_of_a_spec_is_changed_here() -> None:
    assert CHANGES.keys() == {each.name for each in fields(ModelSpec)}
    assert NOT_IDENTITY.keys() | BY_CONTENT.keys() <= CHANGES.keys()
    assert not NOT_IDENTITY.keys() & BY_CONTENT.keys()


@pytest.mark.parametrize("field", CHANGES)
def test_another_value_of_a_field_is_another_identity(field: str) -> None:
    """But for names; places count by what is there, and the numerics that are in force."""
    is_other = of(replace(BASE, **{field: CHANGES[field]})) != of(BASE)
    assert is_other is (field == "numerics" or field not in NOT_IDENTITY.keys() | BY_CONTENT.keys())


def test_a_new_field_is_part_of_every_identity() -> None:
    @dataclass(frozen=True, slots=True)
    class Newer(ModelSpec):
        sharpness: int = 0

    known = {each.name: getattr(BASE, each.name) for each in fields(ModelSpec)}
    assert of(Newer(**known)) == of(BASE)  # as a newer version reads an older configuration
    assert of(Newer(**known, sharpness=1)) != of(BASE)


def test_every_setting_of_passes_and_images_counts_or_has_a_reason() -> None:
    assert OF_ENGINE.keys() | NOT_SETTINGS.keys() == set(EngineConfig.model_fields)
    assert of(BASE, **OF_ENGINE) != of(BASE)
    usual = of(BASE)
    assert {each.name for each in fields(Conversion)} == set(ImagesConfig.model_fields)
    for each in fields(Conversion):
        other = settings_of(EngineConfig(), Conversion(**{each.name: not each.default}))
        assert identity(BASE, other, Content()).digest != usual


def test_the_numerics_in_force_count_wherever_they_are_set() -> None:
    assert of(replace(BASE, numerics="bf16")) == of(BASE, numerics="bf16")
    assert of(replace(BASE, numerics="exact"), numerics="bf16") == of(BASE)


def test_a_difference_is_named_by_digits_that_tell_no_setting() -> None:
    secret = identity(replace(BASE, options={"key": "secret"}), {}, Content())
    parts = secret.short_parts
    assert parts.keys() == {"architecture", "numerics", "options"}
    assert all(len(part) == 8 for part in parts.values())


def test_the_identity_is_the_same_in_another_process() -> None:
    options = {"b": {3, 1, 2}, "a": (1, 2.5, None), "kind": nn.ReLU, "odd": nn.Identity()}
    here = of(replace(BASE, options=options))
    code = (
        "from torch import nn; from tests.unit.models.test_identity import *; "
        "options = {'a': [1, 2.5, None], 'odd': nn.Identity(), 'kind': nn.ReLU, 'b': {1, 2, 3}}; "
        "print(of(replace(BASE, options=options)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == here


def test_equal_models_have_one_identity_under_any_id() -> None:
    first, second = hosted(), hosted()
    assert identified(first) == identified(second)
    assert identified(first) == identified(replace(second, spec=replace(second.spec, model_id="other")))


def test_other_weights_structure_or_preprocessing_are_another_identity() -> None:
    torch.manual_seed(0)
    weights = nn.Linear(3, 3).state_dict()
    nets: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        nn.GELU,
        lambda: nn.LeakyReLU(0.1),
        lambda: nn.LeakyReLU(0.2),
    ]
    digests = {identified(hosted()).digest, identified(hosted("random:1")).digest}
    for net in nets:
        module = nn.Sequential(nn.Linear(3, 3), net())
        module[0].load_state_dict(weights)
        digests.add(identified(with_module(module)).digest)
    digests |= {
        identified(hosted(preprocessing=PreprocessingSpec(crop=(8,), **more))).digest
        for more in ({}, {"rules": "transformers"}, {"rules": "transformers", "longest": 9})
    }
    assert len(digests) == 9


def test_a_structure_is_told_without_addresses_and_without_a_repr_that_fails() -> None:
    class Odd(nn.Module):
        def extra_repr(self) -> str:
            return repr(object())

    class Failing(nn.Module):
        def extra_repr(self) -> str:
            raise ValueError

    assert structure_of(Odd()) == structure_of(Odd())
    assert structure_of(nn.Sequential(Failing())) == structure_of(nn.Sequential(Failing()))


def test_other_code_of_a_module_is_another_identity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digests = set()
    for factor in (1, 2):
        path = tmp_path / str(factor) / "own_net.py"
        path.parent.mkdir()
        path.write_text(CODE.format(factor=factor))
        spec = importlib.util.spec_from_file_location("own_net", path)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, "own_net", module)
        spec.loader.exec_module(module)
        torch.manual_seed(0)
        digests.add(identified(with_module(module.Own())).digest)
    assert len(digests) == 2


def test_code_that_is_in_no_file_is_named_and_said_to_be_missing() -> None:
    space: dict[str, Any] = {"__name__": "typed_in"}
    exec(CODE.format(factor=1), space)
    assert not identified(with_module(space["Own"]())).has_code
    assert identified(hosted()).has_code


def test_any_value_has_a_digest() -> None:
    around: list[Any] = []
    around.append(around)
    odd: tuple[Any, ...] = ({1: 2, "a": 3}, {(1, 2): 3}, around, object(), float("nan"), b"x", 1j, "\ud800")
    assert len({digest_of(value) for value in odd}) == len(odd)


SCRIPT = """
import torch, trocar
{before}
class Mine(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = torch.nn.Linear(3, 3)
    def forward(self, x):
        return self.fc(x){power}
if __name__ == "__main__":
    with trocar.connect("local", models={{"m": {{"module": Mine(), "input_shape": [3]}}}}) as client:
        print(client.model("m", has_digest=True).digest)
"""


def test_a_script_may_change_around_the_class_of_its_model(tmp_path: Path) -> None:
    def run(before: str, power: str) -> str:
        path = tmp_path / "mine.py"
        path.write_text(SCRIPT.format(before=before, power=power))
        done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    first = run("", "")
    assert run("more = 1", "") == first
    assert run("more = 1", " ** 2") != first


def test_equal_dataclasses_of_two_kinds_differ() -> None:
    kinds = [dataclasses.make_dataclass(name, [("x", int)]) for name in ("One", "Other")]
    assert len({digest_of(kind(1)) for kind in kinds}) == 2
