"""Fields of newer clients are found at any depth; hostile messages are not walked through to their end."""

import pytest

from trocar_api.v1 import edit_pb2, objective_pb2, reduction_pb2
from trocar_server.errors import ServiceError
from trocar_server.rpc.codec.unknown_fields import refuse_unknown_fields

NEWER = b"\xf8\x7f\x01"  # field 2047


def objective(depth: int, inside: bytes = b"") -> objective_pb2.Objective:
    found = objective_pb2.Objective()
    found.MergeFromString(inside)
    for _ in range(depth):
        found = objective_pb2.Objective(
            terms=[
                objective_pb2.ObjectiveTerm(gradient_penalty=objective_pb2.GradientPenalty(of=found)),
                objective_pb2.ObjectiveTerm(class_score=objective_pb2.ClassScore(classes=[1, 2])),
            ]
        )
    return found


@pytest.mark.parametrize("depth", [0, 1, 2, 20])
def test_a_field_is_found_at_any_depth(depth: int) -> None:
    refuse_unknown_fields({"objective": objective(depth)})
    with pytest.raises(ServiceError, match="field 2047 of Objective"):
        refuse_unknown_fields({"objective": objective(depth, NEWER)})


def test_known_fields_with_unknown_words_are_left_to_those_who_read_them() -> None:
    noise = edit_pb2.Edit.FromString(edit_pb2.Edit(noise={"kind": 99}).SerializeToString())  # type: ignore[arg-type]
    refuse_unknown_fields({"edits[0]": noise})


def test_more_parts_than_edits_can_have_are_refused_in_one_message_and_in_all_together() -> None:
    item = b"\x0a\x00"  # one empty index item
    index = reduction_pb2.IndexReduction.FromString(item * 3_000_000)
    edit = edit_pb2.Edit(region=edit_pb2.EditRegion(index=index))
    with pytest.raises(ServiceError, match="parts"):
        refuse_unknown_fields({"edits[0]": edit})
    with pytest.raises(ServiceError) as caught:
        refuse_unknown_fields({f"edits[{i}]": edit_pb2.Edit() for i in range(70_000)})
    assert caught.value.details["field"] == "edits[65536]"
