"""Merge group: the one place that decides which calls may share a pass.

# Note: [Who may be merged]
In a shared pass the rows of several calls stand in one batch. They are apart only if no operation of the
model mixes rows, and no trial on examples proves that: company after a row is another case than company
before it, and an LSTM over the rows of a batch reads all earlier ones. So the operator allows it for each
model, and can allow it for calls of one principal only, who then sees no data but his own.
"""

from dataclasses import dataclass

from trocar_server.caller import ANONYMOUS, current_principal
from trocar_server.engine.request.numerics import Numerics
from trocar_server.engine.request.plan import Execution
from trocar_server.models.spec import Merge


@dataclass(frozen=True)
class MergeGroup:
    """Calls of one compiled pass with equal groups may be merged.

    Attributes:
        principal: Whose calls these are; None for everybody's.
    """

    principal: str | None


def merge_group(setting: Merge, execution: Execution, numerics: Numerics) -> MergeGroup | None:
    """Return the merge group of the current call; None where it runs alone.

    Args:
        setting: That of the model.
        execution: What the call says.
        numerics: Those of the compiled pass. In another batch size a row has other last bits, so exact calls
            are never merged.
    """
    if setting is Merge.OFF or not execution.merge or numerics is Numerics.EXACT:
        return None
    if setting is Merge.EVERYBODY:
        return MergeGroup(None)
    principal = current_principal()
    if principal is None or principal == ANONYMOUS:  # which may be any number of people
        return None
    return MergeGroup(principal)
