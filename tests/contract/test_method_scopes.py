"""The table of scopes has every method of every service, and nothing else."""

import pytest

from tests.support.wire.methods import GUARDED, HEALTH, OPEN_INFERENCE, OWN, Method, needed_scope
from trocar_server.auth import Scope, with_included
from trocar_server.rpc.call.method_scopes import METHOD_SCOPES, is_open
from trocar_server.rpc.descriptors import service_names
from trocar_server.rpc.oip.service import NOT_OFFERED, OpenInferenceService


def name(method: Method) -> str:
    return method.path


def test_every_method_has_a_scope_and_no_other_has_one() -> None:
    assert set(METHOD_SCOPES) == {method.path for method in GUARDED}


def test_every_service_of_the_contract_is_served() -> None:
    assert {method.service for method in (*OWN, *OPEN_INFERENCE)} == set(service_names())


def test_every_method_of_the_open_inference_protocol_is_answered() -> None:
    answered = {*NOT_OFFERED, *(name for name in vars(OpenInferenceService) if name[0].isupper())}
    assert {method.name for method in OPEN_INFERENCE} == answered


@pytest.mark.parametrize("method", GUARDED, ids=name)
def test_a_method_needs_what_its_name_says(method: Method) -> None:
    assert METHOD_SCOPES[method.path] == needed_scope(method)
    assert not is_open(method.path)


def test_health_is_open() -> None:
    assert all(is_open(method.path) for method in HEALTH)


@pytest.mark.parametrize("path", ["/grpc.health.v1.HealthX/Check", "/x/grpc.health.v1.Health/Check", "", "/"])
def test_what_only_looks_like_health_is_not_open(path: str) -> None:
    assert not is_open(path)


@pytest.mark.parametrize(
    ("scopes", "included"),
    [
        ({"read"}, {"read"}),
        ({"run"}, {"read", "run"}),
        ({"train"}, {"read", "train"}),
        ({"run", "train"}, {"read", "run", "train"}),
        ({"admin"}, {"read", "run", "train", "admin"}),
    ],
)
def test_scopes_include_what_the_guide_says(scopes: set[str], included: set[str]) -> None:
    assert with_included(map(Scope, scopes)) == included
