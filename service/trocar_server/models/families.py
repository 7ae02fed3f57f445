"""Model families: tasks, and the inputs that each task takes."""

from enum import StrEnum, unique

from trocar_server.models.architectures import find_builder


@unique
class Family(StrEnum):
    """Task of a model, by torchvision's packages. The values are the names on the wire."""

    CLASSIFICATION = "classification"
    SEGMENTATION = "segmentation"
    DETECTION = "detection"
    VIDEO = "video"
    OPTICAL_FLOW = "optical_flow"
    CUSTOM = "custom"

    @property
    def takes_list(self) -> bool:
        """Whether the model takes a list of (channels, height, width) tensors, not one batch."""
        return self is Family.DETECTION

    @property
    def takes_images(self) -> bool:
        """Whether one image is one sample. Video and optical flow take arrays only."""
        return self not in (Family.VIDEO, Family.OPTICAL_FLOW)


def family_of(architecture: str) -> Family:
    """Return the family of a torchvision model name; every factory is `CUSTOM`.

    `quantized_*` models, which live in torchvision's `quantization` package, are classifiers.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE`.
    """
    if ":" in architecture:
        return Family.CUSTOM
    package = find_builder(architecture).__module__.removeprefix("torchvision.models.").partition(".")[0]
    return Family(package) if package in list(Family) else Family.CLASSIFICATION
