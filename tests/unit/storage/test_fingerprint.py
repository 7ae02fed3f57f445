"""Digests of weights."""

import torch

from trocar_server.storage.fingerprint import fingerprint


def test_a_fingerprint_knows_every_bit_name_shape_and_dtype_and_no_order() -> None:
    tensors = {"a": torch.arange(6.0), "b": torch.zeros(2)}
    others = [
        {"a": torch.arange(6.0), "b": torch.tensor([0.0, -0.0])},
        {"a": torch.arange(6.0), "c": torch.zeros(2)},
        {"a": torch.arange(6.0), "b": torch.zeros(2, 1)},
        {"a": torch.arange(6.0), "b": torch.zeros(2, dtype=torch.int32)},
        {"a": torch.arange(6.0)},
        {},
    ]
    assert fingerprint(dict(reversed(tensors.items()))) == fingerprint(tensors)
    assert len({fingerprint(other) for other in [tensors, *others]}) == 7


def test_a_fingerprint_is_of_values_not_of_strides() -> None:
    base = torch.arange(6.0).reshape(2, 3)
    assert fingerprint({"a": base.t()}) == fingerprint({"a": base.t().contiguous()})
