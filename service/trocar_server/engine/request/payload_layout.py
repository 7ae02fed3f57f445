"""Payload layout: the field that each payload of a call belongs to."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice

from trocar_server.engine.request.plan import Payload, Payloads, Plan, input_payload_count
from trocar_server.tensors.reductions import operand_specs

NO_STORED: Mapping[str, Sequence[Payload]] = {}
"""Tensors of a plan without stored edits."""


def split_payloads(
    plan: Plan, payloads: Sequence[Payload], stored: Mapping[str, Sequence[Payload]] = NO_STORED
) -> Payloads:
    """Sort received payloads by their use; the tensors of stored edits, which are not sent, are inserted.

    Args:
        plan: The plan of the call.
        payloads: As many as the plan's byte counts, in their order.
        stored: The tensors of the stored edits that the plan names, by the name of their list.
    """
    remaining = iter(payloads)
    return Payloads(
        inputs=list(islice(remaining, input_payload_count(plan.inputs, plan.unprocessed))),
        taps=list(_of_taps(plan, remaining, stored)),
        edits=list(_of_edits(plan, remaining, stored)),
        objective=list(islice(remaining, len(plan.objective_operands))),
        sources=[
            list(islice(remaining, input_payload_count(source.inputs, source.unprocessed)))
            for source in plan.sources
        ],
    )


def _of_taps(
    plan: Plan, remaining: Iterator[Payload], stored: Mapping[str, Sequence[Payload]]
) -> Iterator[Payload]:
    kept = {name: iter(tensors) for name, tensors in stored.items()}
    for tap in plan.taps:
        yield from islice(kept[tap.stored] if tap.stored else remaining, len(operand_specs(tap.reductions)))


def _of_edits(
    plan: Plan, remaining: Iterator[Payload], stored: Mapping[str, Sequence[Payload]]
) -> Iterator[Payload]:
    # A list that is named twice starts over, and is always complete.
    kept = {name: cycle(tensors) for name, tensors in stored.items()}
    for request in plan.edits:
        source, edit = kept[request.stored] if request.stored else remaining, request.edit
        yield from islice(source, len(edit.own_operands))
        if request.stored_gate:
            yield from islice(kept[request.stored_gate], len(edit.operands) - len(edit.own_operands))
