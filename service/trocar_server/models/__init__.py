"""Models: catalogue, loading, preprocessing and replicas.

    catalogue = Catalogue()
    entry = catalogue.add(parse_model_argument("resnet18=random:0"))
    hosted = load_model(entry.spec, torch.device("cpu"), data_dir)
    tree = hosted.pristine.tree()  # for one pass

Knows no gRPC, no protobuf and no hooks of ours.
"""

from trocar_server.caller import (
    ANONYMOUS,
    current_flow,
    current_principal,
    is_unproven,
    set_flow,
    set_principal,
)
from trocar_server.models.architectures import default_categories
from trocar_server.models.catalogue import Catalogue, CatalogueEntry, ModelState, client_spec, guest_refused
from trocar_server.models.families import Family, family_of
from trocar_server.models.hosted import HostedModel
from trocar_server.models.inputs import InputSignature, InputSpec
from trocar_server.models.loading import load_model
from trocar_server.models.preprocessing import PreprocessingInfo, Preprocessor
from trocar_server.models.pristine import Pristine
from trocar_server.models.replicas import (
    make_hosted_copy,
    make_meta_replica,
    make_replica,
    make_training_copy,
)
from trocar_server.models.source import is_source
from trocar_server.models.spec import (
    ModelSpec,
    PreprocessingSpec,
    named_model,
    parse_model_argument,
    parse_model_arguments,
    same_id,
)
from trocar_server.models.stages import stages_for
from trocar_server.models.weights.convert import convert_checkpoint
from trocar_server.models.weights.downloads import clean_downloads, prefetch_weights

__all__ = [
    "ANONYMOUS",
    "Catalogue",
    "CatalogueEntry",
    "Family",
    "HostedModel",
    "InputSignature",
    "InputSpec",
    "ModelSpec",
    "ModelState",
    "PreprocessingInfo",
    "PreprocessingSpec",
    "Preprocessor",
    "Pristine",
    "clean_downloads",
    "client_spec",
    "convert_checkpoint",
    "current_flow",
    "current_principal",
    "default_categories",
    "family_of",
    "guest_refused",
    "is_source",
    "is_unproven",
    "load_model",
    "make_hosted_copy",
    "make_meta_replica",
    "make_replica",
    "make_training_copy",
    "named_model",
    "parse_model_argument",
    "parse_model_arguments",
    "prefetch_weights",
    "same_id",
    "set_flow",
    "set_principal",
    "stages_for",
]
