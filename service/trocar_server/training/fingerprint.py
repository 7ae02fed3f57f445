"""One text for all weights of a model: equal for equal weights, bit by bit."""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from trocar_server.training.snapshots import snapshot_tensors
from trocar_server.training.tensor_file import lay_out


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, dtypes, shapes and values, in hex; the order does not count.

        fingerprint(hosted.module.state_dict())

    Args:
        state: Tensors by name. Those on another device are copied one by one: owner thread only. All on the
            CPU and changed by nobody: on any thread, about a second for each GB.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        tensors = snapshot_tensors({name: state[name]}, unchanging=(name,))
        for piece in lay_out(tensors, {}).pieces():
            digest.update(piece)
    return digest.hexdigest()
