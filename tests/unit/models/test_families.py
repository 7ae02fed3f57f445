import pytest
from torchvision import models

from trocar_server.errors import ServiceError
from trocar_server.models.families import Family, family_of


@pytest.mark.parametrize("package", ["segmentation", "detection", "video", "optical_flow"])
def test_the_family_is_torchvisions_package(package: str) -> None:
    names = models.list_models(getattr(models, package))
    assert names
    assert {family_of(name) for name in names} == {Family(package)}


def test_plain_and_quantized_models_are_classifiers() -> None:
    names = models.list_models(models) + models.list_models(models.quantization)
    assert {family_of(name) for name in names} == {Family.CLASSIFICATION}


def test_a_factory_is_custom() -> None:
    assert family_of("module:factory") is Family.CUSTOM


def test_an_unknown_name_has_no_family() -> None:
    with pytest.raises(ServiceError):
        family_of("resnet")
