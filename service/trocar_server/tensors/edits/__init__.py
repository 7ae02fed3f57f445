"""Operations on values: set, scale, clamp, steer and the like; usable alone on any tensor.

    from trocar_server.tensors.edits import Edit, Region, Scale, edit_value

    edit_value(Edit(Scale(0.5)), feature_map)

`surgery` applies them to the values of a pass and to gradients.
"""

from trocar_server.tensors.edits.apply_edit import apply_operation, edit_value
from trocar_server.tensors.edits.base import OPERATIONS, Operation
from trocar_server.tensors.edits.channels import Cap, Project, ProjectOnto, Steer, TopK
from trocar_server.tensors.edits.edit import WHOLE, Edit, Gate, Region
from trocar_server.tensors.edits.edit_checks import (
    check_edit,
    check_operands,
    mixed_dims,
    selected_dims,
    selects_nothing,
)
from trocar_server.tensors.edits.edit_memory import edit_bytes
from trocar_server.tensors.edits.elementwise import Add, Affine, Clamp, NanToNum, Scale, Set, Zero
from trocar_server.tensors.edits.noise import Dropout, Noise, NoiseKind
from trocar_server.tensors.edits.norms import Normalise, NormScope
from trocar_server.tensors.edits.other_values import AddInput, Skip, Swap
from trocar_server.tensors.edits.part import Operand
from trocar_server.tensors.edits.rounding import Cast
from trocar_server.tensors.edits.samples import MeanAblate, Resample
from trocar_server.tensors.edits.value_dtypes import check_finite

__all__ = [
    "OPERATIONS",
    "WHOLE",
    "Add",
    "AddInput",
    "Affine",
    "Cap",
    "Cast",
    "Clamp",
    "Dropout",
    "Edit",
    "Gate",
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
    "apply_operation",
    "check_edit",
    "check_finite",
    "check_operands",
    "edit_bytes",
    "edit_value",
    "mixed_dims",
    "selected_dims",
    "selects_nothing",
]
