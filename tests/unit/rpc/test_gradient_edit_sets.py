"""Rules over sets of gradients, from the client's words to the server's spec and back."""

import trocar
from trocar_api.v1 import trainer_pb2 as pb
from trocar_server.rpc.codec.trainer_specs import spec_message, trainer_spec


def test_a_rule_over_several_selectors_arrives_and_comes_back() -> None:
    rule = trocar.training.gradient_edit(["layer4", "fc"], "zero_if", above=3.0, nonfinite=True, mode="any")
    late = trocar.training.gradient_edit("fc.*", "clamp", low=-1, high=1, when="accumulated")
    spec = trainer_spec(pb.TrainerSpec(model_id="m", gradient_edits=[rule.to_wire(), late.to_wire()]))
    first, second = spec.gradient_edits
    assert (first.selector, first.selectors, first.when) == ("layer4", ("fc",), "batch")
    assert first.options == {"above": 3.0, "nonfinite": True, "mode": "any"}
    assert (second.selector, second.selectors, second.when) == ("fc.*", (), "accumulated")
    assert trainer_spec(spec_message(spec)) == spec
