"""Merge group: the one place that decides which calls may share a pass.

# Note: [Who may be merged]
In a shared pass the rows of several calls stand in one batch. They are apart only if no operator of the pass
mixes rows. No trial on examples shows that, since company after a row is another case than company before it;
so it is proved for each compiled pass, see Note: [Independent rows], and without a proof its calls run alone.
The operator says whose calls may share a pass then: by default those of one principal, who sees no data but
his own.
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


def merge_group(
    setting: Merge, execution: Execution, numerics: Numerics, mixed_rows: str
) -> MergeGroup | None:
    """Return the merge group of the current call; None where it runs alone.

    Args:
        setting: That of the model.
        execution: What the call says.
        numerics: Those of the compiled pass. In another batch size a row has other last bits, so exact calls
            are never merged.
        mixed_rows: Why rows of the pass may depend on each other; empty where they do not.
    """
    if mixed_rows or setting is Merge.OFF or not execution.merge or numerics is Numerics.EXACT:
        return None
    if setting is Merge.EVERYBODY:
        return MergeGroup(None)
    principal = current_principal()
    if principal is None or principal == ANONYMOUS:  # which may be any number of people
        return None
    return MergeGroup(principal)
