"""Which backends are tried for a compiled pass, and in which order."""

from pathlib import Path

import pytest
import torch

from tests.unit.engine.compiled.backends.nets import folding, out, recipe
from trocar_server.engine.compiled.backends.build_worker import Built
from trocar_server.engine.compiled.backends.candidates import candidates, has_openvino
from trocar_server.engine.request.numerics import Numerics

ORDER = {
    (Numerics.EXACT, True): [],
    (Numerics.FAST, False): [("torch", Numerics.FAST)],
    (Numerics.FAST, True): [("openvino", Numerics.FAST), ("torch", Numerics.FAST)],
    (Numerics.BF16, False): [("torch", Numerics.BF16), ("torch", Numerics.FAST)],
    (Numerics.BF16, True): [
        ("openvino", Numerics.BF16),
        ("torch", Numerics.BF16),
        ("openvino", Numerics.FAST),
        ("torch", Numerics.FAST),
    ],
}


@pytest.mark.parametrize(("numerics", "has_graph"), ORDER)
def test_loosest_numerics_and_openvino_come_first(
    tmp_path: Path, numerics: Numerics, has_graph: bool
) -> None:
    built = Built((), has_graph)
    found = list(candidates(recipe(out("fc")), numerics, built, tmp_path, folding, 1))
    assert [(candidate.engine, candidate.numerics) for candidate in found] == ORDER[numerics, has_graph]
    assert [candidate.calls_torch for candidate in found] == [one.engine == "torch" for one in found]


def test_openvino_is_used_on_a_cpu_where_it_can_be_imported() -> None:
    try:
        import openvino  # noqa: F401
    except ModuleNotFoundError:
        can_be_imported = False
    else:
        can_be_imported = True
    assert has_openvino(torch.device("cpu")) is can_be_imported
    assert not has_openvino(torch.device("cuda"))
