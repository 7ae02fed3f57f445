"""Catalogue, loading, preprocessing and replicas: from what an operator wrote to a model in memory.

    catalogue = Catalogue()
    entry = catalogue.add(parse_model_argument("resnet18=random:0"))
    hosted = load_model(entry.spec, torch.device("cpu"), data_dir)
    replica = make_replica(hosted.module)

Knows no gRPC, no protobuf and no hooks of ours.
"""

from trocar_server.models.architectures import default_categories
from trocar_server.models.catalogue import Catalogue, Entry, ModelState, client_spec, guest_refused
from trocar_server.models.convert import convert_checkpoint
from trocar_server.models.downloads import clean_downloads, prefetch_weights
from trocar_server.models.families import Family, family_of
from trocar_server.models.hosted import HostedModel
from trocar_server.models.images import decode_image, image_from_pixels
from trocar_server.models.loading import load_model
from trocar_server.models.preprocessing import PreprocessingInfo, Preprocessor
from trocar_server.models.principals import (
    ANONYMOUS,
    current_flow,
    current_principal,
    set_flow,
    set_principal,
)
from trocar_server.models.replicas import (
    make_hosted_copy,
    make_meta_replica,
    make_replica,
    make_training_copy,
)
from trocar_server.models.spec import ModelSpec, PreprocessingSpec, parse_model_argument
from trocar_server.models.stages import stages_for

__all__ = [
    "ANONYMOUS",
    "Catalogue",
    "Entry",
    "Family",
    "HostedModel",
    "ModelSpec",
    "ModelState",
    "PreprocessingInfo",
    "PreprocessingSpec",
    "Preprocessor",
    "clean_downloads",
    "client_spec",
    "convert_checkpoint",
    "current_flow",
    "current_principal",
    "decode_image",
    "default_categories",
    "family_of",
    "guest_refused",
    "image_from_pixels",
    "load_model",
    "make_hosted_copy",
    "make_meta_replica",
    "make_replica",
    "make_training_copy",
    "parse_model_argument",
    "prefetch_weights",
    "set_flow",
    "set_principal",
    "stages_for",
]
