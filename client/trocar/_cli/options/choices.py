"""Choice options of commands."""

from enum import StrEnum


class Format(StrEnum):
    """File format of shards."""

    SAFETENSORS = "safetensors"
    ZARR = "zarr"
    PARQUET = "parquet"
    NPY = "npy"


class Decode(StrEnum):
    """Side that decodes images."""

    SERVER = "server"
    CLIENT = "client"


class OnError(StrEnum):
    """Handling of failed samples."""

    STOP = "stop"
    SKIP = "skip"


class CamMethod(StrEnum):
    """Method of `trocar cam`."""

    GRAD_CAM = "grad_cam"
    GRAD_CAM_PLUS_PLUS = "grad_cam++"
    SALIENCY = "saliency"
    INPUT_X_GRADIENT = "input_x_gradient"
    INTEGRATED_GRADIENTS = "integrated_gradients"
    SMOOTHGRAD = "smoothgrad"
    LAYER_CONDUCTANCE = "layer_conductance"
    GUIDED_BACKPROP = "guided_backprop"
    OCCLUSION = "occlusion"


class Activations(StrEnum):
    """How scores are computed from a model's output."""

    SOFTMAX = "softmax"
    SIGMOID = "sigmoid"
    NONE = "none"


class MetricChoice(StrEnum):
    """How features are compared in a search."""

    COSINE = "cosine"
    EUCLIDEAN = "euclidean"
    DOT = "dot"


class DistanceChoice(StrEnum):
    """How two samples differ in their features."""

    CORRELATION = "correlation"
    EUCLIDEAN = "euclidean"
    COSINE = "cosine"


class CompareChoice(StrEnum):
    """How two sets of dissimilarities are compared."""

    SPEARMAN = "spearman"
    PEARSON = "pearson"
    COSINE = "cosine"
