"""A plan as people see it."""

import trocar


def test_it_prints_what_each_edit_changes() -> None:
    plan = trocar.ExtractionPlan(
        "m", {}, {}, "fc", 0, 0, 0, True, edit_expansions={"layer*": ("layer1", "layer2")}
    )
    assert "edits layer*: layer1, layer2" in str(plan).splitlines()
