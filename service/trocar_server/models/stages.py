"""Stages of torchvision's models: `stem`, `stage1` to `stageN`, `penultimate` and `head` as selectors.

    stages_of("resnet50")       # {"stem": "maxpool", "stage1": "layer1", ..., "head": "fc"}

# Note: [Stages]
`stageN` is the last value before the width and height are halved again, from a quarter of the input's on:
1/4, 1/8, 1/16 and 1/32 for stages 1 to 4, as in timm's feature extractors. What comes before the first is
`stem`. A plain vision transformer keeps one size: its stages are quarters of its blocks. Backbones of
segmentation models are dilated, so that their last stages stay at 1/8 or 1/16, and video ResNets begin at
1/2. `head` is the layer that makes the class scores and `penultimate` its input, (batch, width) wherever that
layer is a linear one.
"""

from collections.abc import Iterable
from itertools import accumulate, chain

from trocar_server.models.hosted import HostedModel

Stages = dict[str, str]
"""Selectors by stage name."""

_VGG_CONVOLUTIONS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}
_VIT_BLOCKS = {"vit_b": 12, "vit_l": 24, "vit_h": 32}
_MOBILENET_V3_LARGE = (0, 3, 6, 12, 15)

_QUANTIZED = "quantized_"


def stages_for(model: HostedModel) -> Stages:
    """Stages of a model: its library's or architecture's, overridden by the operator's."""
    spec = model.spec
    return {**(model.stages if spec.is_custom else stages_of(spec.architecture)), **spec.stages}


def stages_of(architecture: str) -> Stages:
    """Stages of a torchvision architecture; none if the family has no such layout.

    Families without stages: optical flow, SSD, and every factory of an operator.
    """
    name = architecture.removeprefix(_QUANTIZED)
    if name.endswith(("_fpn", "_fpn_v2")):
        return _backbone_of_detection(name)
    if name.startswith(("deeplabv3_", "fcn_", "lraspp_")):
        return _segmentation(name)
    if name.startswith("vgg"):
        return _vgg(name)
    if name.startswith("vit_"):
        return _vit(name)
    result = (stages for prefix, stages in _FAMILIES.items() if name.startswith(prefix))
    return dict(next(result, {}))


def _stages(modules: Iterable[str], head: str = "") -> Stages:
    """Name modules in order, the first `stem`; a head's input is `penultimate`."""
    stem, *others = modules
    stages = {"stem": stem, **{f"stage{i}": module for i, module in enumerate(others, 1)}}
    return {**stages, "penultimate": f"{head}/in", "head": head} if head else stages


def _children(parent: str, indices: Iterable[int], head: str = "") -> Stages:
    return _stages([f"{parent}.{index}" for index in indices], head)


def _resnet(prefix: str = "", head: str = "") -> Stages:
    return _stages([f"{prefix}{name}" for name in ("maxpool", "layer1", "layer2", "layer3", "layer4")], head)


def _vgg(name: str) -> Stages:
    """Return a VGG's stages: each is what its next pooling halves, the last is the last pooling's output."""
    architecture, _, norm = name.partition("_")
    layers = 3 if norm else 2  # convolution, batch norm if any, ReLU
    convolutions = _VGG_CONVOLUTIONS.get(architecture, ())
    pools = [end - 1 for end in accumulate(layers * count + 1 for count in convolutions)]
    ends = chain((pool - 1 for pool in pools[1:]), pools[-1:])
    return _children("features", ends, "classifier.6") if pools else {}


def _vit(name: str) -> Stages:
    count = _VIT_BLOCKS.get(name[:5], 0)
    ends = [count * quarter // 4 - 1 for quarter in (1, 2, 3, 4)]
    blocks = [f"encoder.layers.encoder_layer_{end}" for end in ends]
    layers = {f"layer[{index}]": f"encoder.layers.encoder_layer_{index}" for index in range(count)}
    return {**_stages(["conv_proj", *blocks], "heads.head"), **layers} if count else {}


def _segmentation(name: str) -> Stages:
    is_resnet = "_resnet" in name
    head = "classifier.4"
    if name.startswith("lraspp_"):  # its scores are a sum of two layers' outputs
        return {**_children("backbone", _MOBILENET_V3_LARGE), "head": "classifier"}
    return _resnet("backbone.", head) if is_resnet else _children("backbone", _MOBILENET_V3_LARGE, head)


def _backbone_of_detection(name: str) -> Stages:
    is_resnet = "_resnet" in name
    return _resnet("backbone.body.") if is_resnet else _children("backbone.body", _MOBILENET_V3_LARGE)


_VIDEO_RESNET = _stages(["stem", "layer1", "layer2", "layer3", "layer4"], "fc")

_FAMILIES: dict[str, Stages] = {
    "alexnet": _children("features", (0, 1, 4, 11, 12), "classifier.6"),
    "convnext_": _children("features", (0, 1, 3, 5, 7), "classifier.2"),
    "densenet": _stages(
        [f"features.{part}" for part in ("pool0", "denseblock1", "denseblock2", "denseblock3", "norm5")],
        "classifier",
    ),
    "efficientnet_b": _children("features", (0, 2, 3, 5, 7), "classifier.1"),
    "efficientnet_v2_s": _children("features", (0, 2, 3, 5, 6), "classifier.1"),
    "efficientnet_v2_": _children("features", (0, 2, 3, 5, 7), "classifier.1"),
    "googlenet": _stages(["conv1", "conv3", "inception3b", "inception4e", "inception5b"], "fc"),
    "inception_v3": _stages(["Conv2d_2b_3x3", "Conv2d_4a_3x3", "Mixed_5d", "Mixed_6e", "Mixed_7c"], "fc"),
    "maxvit_": _stages(["stem", *(f"blocks.{index}" for index in range(4))], "classifier.5"),
    "mc3_": _VIDEO_RESNET,
    "mnasnet": _children("layers", (7, 8, 9, 11, 13), "classifier.1"),
    "mobilenet_v2": _children("features", (0, 3, 6, 13, 17), "classifier.1"),
    "mobilenet_v3_large": _children("features", _MOBILENET_V3_LARGE, "classifier.3"),
    "mobilenet_v3_small": _children("features", (0, 1, 3, 8, 11), "classifier.3"),
    "mvit_": {
        **_stages(["conv_proj", *(f"blocks.{index}[0]" for index in (0, 2, 13, 15))]),
        "penultimate": "head.1/in",
        "head": "head",
    },
    "r2plus1d_": _VIDEO_RESNET,
    "r3d_": _VIDEO_RESNET,
    "regnet_": _stages(["stem", *(f"trunk_output.block{index}" for index in (1, 2, 3, 4))], "fc"),
    "resnet": _resnet(head="fc"),
    "resnext": _resnet(head="fc"),
    "s3d": _children("features", (0, 3, 6, 12, 15), "classifier.1"),
    "shufflenet_v2_": _stages(["conv1", "maxpool", "stage2", "stage3", "stage4"], "fc"),
    "squeezenet1_0": _children("features", (1, 5, 10, 12), "classifier.1"),
    "squeezenet1_1": _children("features", (1, 4, 7, 12), "classifier.1"),
    "swin3d_": _stages(["patch_embed", *(f"features.{index}" for index in (0, 2, 4, 6))], "head"),
    "swin_": _children("features", (0, 1, 3, 5, 7), "head"),
    "wide_resnet": _resnet(head="fc"),
}
"""By the beginning of the architecture's name; the first that fits counts."""
