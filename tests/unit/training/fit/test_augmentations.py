import random
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError
from trocar_server.training.datasets.order import random_numbers
from trocar_server.training.fit.augmentations import NAMES, make_augmentation
from trocar_server.training.spec.fit_spec import AugmentationSpec

OPTIONS: dict[str, dict[str, Any]] = {
    "RandomCrop": {"size": 32, "padding": [4.0]},
    "RandomResizedCrop": {"size": [32.0, 32.0]},
    "RandomRotation": {"degrees": 10},
    "RandomAffine": {"degrees": 10, "translate": [0.1, 0.1]},
    "CenterCrop": {"size": 24},
    "Pad": {"padding": 2},
    "Resize": {"size": 20},
    "GaussianBlur": {"kernel_size": 3},
    "Grayscale": {"num_output_channels": 3},
    "Normalize": {"mean": [0.5, 0.5, 0.5], "std": [0.5, 0.5, 0.5]},
    "RandomPosterize": {"bits": 4},
    "RandomSolarize": {"threshold": 0.5},
    "RandomAdjustSharpness": {"sharpness_factor": 2.0},
    "ColorJitter": {"brightness": 0.2},
}
IMAGE = torch.rand(3, 32, 32, generator=torch.Generator().manual_seed(0))


def spec(name: str, **options: Any) -> AugmentationSpec:
    return AugmentationSpec(name=name, options=options or OPTIONS.get(name, {}))


@pytest.mark.parametrize("name", NAMES)
def test_result_is_that_of_torchvision_and_the_image_stays(name: str) -> None:
    augmentation, before = make_augmentation([spec(name)]), IMAGE.clone()
    options = {
        key: [int(x) for x in value] if key in ("size", "padding") and isinstance(value, list) else value
        for key, value in OPTIONS.get(name, {}).items()
    }
    for seed in range(3):
        with random_numbers(seed):
            mine = augmentation(IMAGE)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            theirs = getattr(v2, name)(**options)(IMAGE.clone())
        assert torch.equal(mine, theirs)
    assert torch.equal(IMAGE, before)


@pytest.mark.parametrize("name", NAMES)
def test_only_torchs_generator_is_used_and_steady_ones_never_vary(name: str) -> None:
    augmentation = make_augmentation([spec(name)])
    state, numpy_state = random.getstate(), str(np.random.get_state())
    results = []
    for seed in range(20):
        with random_numbers(seed):
            results.append(augmentation(IMAGE))
    varies = any(not torch.equal(results[0], result) for result in results)

    assert varies is augmentation.is_random
    assert random.getstate() == state
    assert str(np.random.get_state()) == numpy_state


def test_they_run_in_order() -> None:
    augmentation = make_augmentation([spec("Pad", padding=4), spec("Resize", size=16)])
    assert augmentation(IMAGE).shape == (3, 16, 16)
    assert torch.equal(augmentation(IMAGE), v2.Resize(16)(v2.Pad(4)(IMAGE)))


def test_all_problems_come_at_once() -> None:
    wrong = [
        spec("Lambda"),
        spec("RandomHorizontalFlip", q=1, p=2.0),
        AugmentationSpec(name="RandomCrop"),
        spec("RandomErasing", inplace=True),
        spec("Resize", size=10**9),
        spec("RandomRotation", degrees=float("nan")),
        spec("AutoAugment", policy="best"),
        spec("RandomRotation", degrees=10, expand=True),
        spec("MixUp"),
    ]
    with pytest.raises(ServiceError) as failure:
        make_augmentation(wrong)
    assert failure.value.reason is ErrorReason.FIT_INVALID
    assert all(
        f"augmentations[{index}] ({one.name})" in failure.value.message for index, one in enumerate(wrong)
    )


@pytest.mark.parametrize(
    "bad",
    [
        spec("RandomHorizontalFlip", p=2.0),
        spec("RandomHorizontalFlip", p="often"),
        spec("GaussianBlur", kernel_size=99),
        spec("GaussianBlur", kernel_size=4),
        spec("GaussianBlur", kernel_size="x"),
        spec("RandomCrop", size=64),
        spec("RandomCrop", size=["a"]),
        spec("RandomCrop", size=2.5),
        spec("Normalize", mean=[0.5], std=[0.0]),
        spec("Grayscale", num_output_channels=1),
        spec("RandAugment", num_ops=10**6),
        spec("ColorJitter", brightness=float("inf")),
    ],
    ids=str,
)
def test_bad_options_are_refused_before_anything_starts(bad: AugmentationSpec) -> None:
    with pytest.raises(ServiceError) as failure:
        make_augmentation([bad])
    assert failure.value.reason is ErrorReason.FIT_INVALID


@pytest.mark.parametrize(
    ("specs", "position"),
    [
        ([spec("Resize", size=205)], 0),
        ([spec("Pad", padding=76), spec("Pad", padding=76), spec("Pad", padding=4096)], 1),
        ([spec("Pad", padding=150), spec("CenterCrop", size=8)], 0),
    ],
)
def test_batches_too_large_for_memory_are_refused(specs: list[AugmentationSpec], position: int) -> None:
    """2200 samples of (3, 201, 201) have 1 GiB."""
    with pytest.raises(ServiceError, match=rf"^augmentations.{position}. .*1,073,741,824 bytes.*batch_size"):
        make_augmentation(specs, batch_size=2200)
    assert make_augmentation([spec("Resize", size=201)], batch_size=2200)


@pytest.mark.parametrize("sigma", [101.5, [5.0, 2000.0]])
def test_a_kernel_as_large_as_memory_is_refused_without_making_it(sigma: Any) -> None:
    with pytest.raises(ServiceError, match=r"ElasticTransform.: option 'sigma' is at most 100"):
        make_augmentation([spec("ElasticTransform", sigma=sigma)])


def test_samples_that_are_no_images_are_refused() -> None:
    with pytest.raises(ServiceError, match="channels, height, width"):
        make_augmentation([spec("RandomHorizontalFlip")], (64,))


def test_the_trial_leaves_the_generators_alone() -> None:
    state = torch.get_rng_state()
    make_augmentation([spec("RandAugment"), spec("RandomErasing")])
    assert torch.equal(torch.get_rng_state(), state)
