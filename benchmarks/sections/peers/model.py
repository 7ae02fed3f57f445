"""The same model for every peer: torchvision's extractor of `layer4`, eager, float32."""

from typing import Any

TAP = "layer4"


def extractor(name: str) -> Any:
    """Return a function from a NumPy batch to the values of `layer4`."""
    import torch
    from torchvision.models import get_model
    from torchvision.models.feature_extraction import create_feature_extractor

    torch.manual_seed(0)
    made = create_feature_extractor(get_model(name, weights=None).eval(), [TAP])

    def extract(batch: Any) -> Any:
        with torch.inference_mode():
            return made(torch.from_numpy(batch.copy()))[TAP].numpy()

    return extract
