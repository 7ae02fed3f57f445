"""Operations on values: set, scale, clamp, steer and the like; usable alone on any tensor.

    from trocar_server.edits import Edit, Region, Scale, edit_value

    edit_value(Edit(Scale(0.5)), feature_map)

`surgery` brings them to the values of a pass and to gradients.
"""

from trocar_server.edits.apply import edit_value
from trocar_server.edits.base import Operand, Operation
from trocar_server.edits.checking import check_edit
from trocar_server.edits.dtypes import check_constants, check_finite
from trocar_server.edits.edit import WHOLE, Edit, Region
from trocar_server.edits.memory import edit_bytes
from trocar_server.edits.operation import (
    Add,
    AddInput,
    Affine,
    Cast,
    Clamp,
    Dropout,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Project,
    ProjectOnto,
    Resample,
    Scale,
    Set,
    Skip,
    Steer,
    Swap,
    TopK,
    Zero,
)

__all__ = [
    "WHOLE",
    "Add",
    "AddInput",
    "Affine",
    "Cast",
    "Clamp",
    "Dropout",
    "Edit",
    "MeanAblate",
    "NanToNum",
    "Noise",
    "NoiseKind",
    "NormScope",
    "Normalise",
    "Operand",
    "Operation",
    "Project",
    "ProjectOnto",
    "Region",
    "Resample",
    "Scale",
    "Set",
    "Skip",
    "Steer",
    "Swap",
    "TopK",
    "Zero",
    "check_constants",
    "check_edit",
    "check_finite",
    "edit_bytes",
    "edit_value",
]
