"""Fingerprint of a model: equal for bit-equal weights."""

import hashlib
from collections.abc import Mapping

from torch import Tensor

from trocar_server.storage.tensor_file import lay_out


def fingerprint(state: Mapping[str, Tensor]) -> str:
    """Return the sha256 over names, dtypes, shapes and values, in hex, independent of their order.

        fingerprint(hosted.module.state_dict())

    Args:
        state: Tensors by name. Those on another device are copied one by one: owner thread only. If all are
            on the CPU and not modified meanwhile: any thread, about a second per GB.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        plain = state[name].detach().resolve_conj().resolve_neg()
        for piece in lay_out({name: plain.cpu().contiguous()}, {}).pieces():
            digest.update(piece)
    return digest.hexdigest()
