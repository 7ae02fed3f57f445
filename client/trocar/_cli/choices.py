"""Options of `trocar extract` that take one of a few words."""

from enum import StrEnum


class Format(StrEnum):
    """How shards are written."""

    SAFETENSORS = "safetensors"
    ZARR = "zarr"
    PARQUET = "parquet"
    NPY = "npy"


class Decode(StrEnum):
    """Who decodes images."""

    SERVER = "server"
    CLIENT = "client"


class OnError(StrEnum):
    """What to do with samples that fail."""

    STOP = "stop"
    SKIP = "skip"


class CamMethod(StrEnum):
    """What `trocar cam` draws."""

    GRAD_CAM = "grad_cam"
    GRAD_CAM_PLUS_PLUS = "grad_cam++"
    SALIENCY = "saliency"
    INPUT_X_GRADIENT = "input_x_gradient"
    INTEGRATED_GRADIENTS = "integrated_gradients"
    SMOOTHGRAD = "smoothgrad"
    LAYER_CONDUCTANCE = "layer_conductance"
    GUIDED_BACKPROP = "guided_backprop"
    OCCLUSION = "occlusion"
