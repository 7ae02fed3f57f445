"""Operations on values: set, scale, clamp, steer and the like; usable alone on any tensor.

    from trocar_server.edits import Edit, Region, Scale, edit_value

    edit_value(Edit(Scale(0.5)), feature_map)

`surgery` brings them to the values of a pass and to gradients.
"""

from trocar_server.edits.operation import (
    WHOLE,
    Add,
    AddInput,
    Affine,
    Cast,
    Clamp,
    Dropout,
    Edit,
    MeanAblate,
    NanToNum,
    Noise,
    NoiseKind,
    Normalise,
    NormScope,
    Operand,
    Operation,
    Project,
    ProjectOnto,
    Region,
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
]
