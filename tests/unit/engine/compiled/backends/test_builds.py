"""Building in another process."""

import re
from pathlib import Path

import pytest

from tests.support.models.row_models import WIDTH, Mixing
from tests.support.models.tiny_models import DataDependent, Plain
from tests.unit.engine.compiled.backends.nets import batch, out, recipe
from tests.unit.engine.compiled.backends.test_torch_runner import eager
from trocar_server.engine.compiled.backends.build_worker import Built, Job
from trocar_server.engine.compiled.backends.builds import build_apart
from trocar_server.engine.compiled.backends.openvino_runner import OpenVinoRunner
from trocar_server.engine.request.numerics import Numerics, worst_deviation
from trocar_server.models import ModelSpec

WANTED = recipe(out("conv"), out("fc"))


def spec(kind: type, shape: tuple[int, ...] = (3, 8, 8)) -> ModelSpec:
    return ModelSpec("tiny", f"{kind.__module__}:{kind.__qualname__}", "random:0", input_shape=shape)


async def test_another_process_builds_the_very_model(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    built = await build_apart(Job(spec(Plain), tmp_path, WANTED, tmp_path, True))
    assert built == Built(pairs=(), has_graph=True, problem="", mixed_rows="")
    import torch

    torch.manual_seed(0)
    expected = eager(Plain().eval(), WANTED, batch(3))
    found = OpenVinoRunner(tmp_path, WANTED, Numerics.FAST, 1).run([batch(3)])
    assert worst_deviation(Numerics.FAST, expected, found) < 1


@pytest.mark.parametrize("with_openvino", [False, True])
async def test_another_process_says_why_rows_may_mix(tmp_path: Path, with_openvino: bool) -> None:
    spec = ModelSpec(
        "tiny",
        f"{Mixing.__module__}:{Mixing.__qualname__}",
        "random:0",
        input_shape=(WIDTH,),
        options={"mix": "mean"},
    )
    built = await build_apart(
        Job(spec, tmp_path, recipe(out("linear"), row=(WIDTH,)), tmp_path, with_openvino)
    )
    assert built.mixed_rows == "aten.mean.dim in 'model': it goes along the rows"


async def test_a_model_that_cannot_be_followed_has_a_problem_and_no_graph(tmp_path: Path) -> None:
    pytest.importorskip("openvino")
    wanted = recipe(out(""), row=(3,))
    built = await build_apart(Job(spec(DataDependent, (3,)), tmp_path, wanted, tmp_path, True))
    assert not built.has_graph
    assert re.match(r"\w+: \w", built.problem), built.problem
    assert "without a result" not in built.problem
    assert str(tmp_path) not in built.problem


async def test_what_exists_in_this_process_only_is_not_built(tmp_path: Path) -> None:
    here = ModelSpec("tiny", "here:Plain", "random:0", input_shape=(3,), factory=lambda: None)
    built = await build_apart(Job(here, tmp_path, WANTED, tmp_path, True))
    assert built == Built(problem=built.problem)
    assert "in another process" in built.problem


async def test_a_process_that_dies_is_a_problem(tmp_path: Path) -> None:
    unknown = ModelSpec("tiny", "tests.unit.engines.no_module:Model", "random:0", input_shape=(3,))
    built = await build_apart(Job(unknown, tmp_path, WANTED, tmp_path, False))
    assert "without a result" in built.problem
