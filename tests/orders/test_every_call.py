"""Every method of every service that changes state has a case, or a reason why not."""

import pytest

from tests.orders import fit_calls, server_calls, stored_calls, trainer_calls
from trocar_server.auth import Scope
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES
from trocar_server.rpc.descriptors import ALL
from trocar_server.rpc.oip.service import NOT_OFFERED

CASES = [*trainer_calls.CASES, *stored_calls.CASES, *server_calls.CASES, *fit_calls.CASES]
ELSEWHERE = {
    "ShareMemory": "lends memory while its call is open: tests/integration/transfer",
    "PrepareCalls": "opens a socket while its call is open: tests/integration/transfer",
}


def changing() -> set[str]:
    """Return the paths of the methods that do more than look, from the descriptors."""
    paths = [f"/{service.full_name}/{method.name}" for service in ALL for method in service.methods]
    return {
        path
        for path in paths
        if METHOD_SCOPES.get(path) is not Scope.READ and path.rpartition("/")[2] not in NOT_OFFERED
    }


def without_case(paths: set[str]) -> set[str]:
    """Return those without a case and without a reason."""
    covered = {
        case.method if case.method.startswith("/") else f"/trocar_api.v1.{case.method}" for case in CASES
    }
    return {path for path in paths - covered if path.rpartition("/")[2] not in ELSEWHERE}


def test_every_method_that_changes_state_is_swept() -> None:
    assert without_case(changing()) == set()


def test_a_new_method_without_a_sweep_is_noticed() -> None:
    new = "/trocar_api.v1.TrainerService/ForgetEverything"
    assert without_case({*changing(), new}) == {new}


@pytest.mark.parametrize("name", ELSEWHERE)
def test_methods_that_are_tried_elsewhere_exist(name: str) -> None:
    assert any(path.endswith(f"/{name}") for path in changing())


def test_names_of_cases_differ() -> None:
    names = [str(case) for case in CASES]
    assert len(set(names)) == len(names)
