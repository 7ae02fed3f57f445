"""Which payload of a call belongs to what."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import cycle, islice

from trocar_server.engine.plan import ArgumentInput, Payload, Payloads, Plan, TensorInput
from trocar_server.rpc.edits import NO_LISTS, StoredList


def split_payloads(
    plan: Plan, payloads: Sequence[Payload], stored: Mapping[str, StoredList] = NO_LISTS
) -> Payloads:
    """Sort what came by what it is for; the tensors of stored edits, which did not come, take their places.

    Args:
        plan: Of the call.
        payloads: As many as the plan's byte counts, in their order.
        stored: The lists that the plan's edits come from, by name.
    """
    remaining = iter(payloads)
    return Payloads(
        inputs=list(islice(remaining, _count(plan.inputs))),
        taps=list(islice(remaining, len(plan.tap_constants))),
        edits=list(_of_edits(plan, remaining, stored)),
        objective=list(islice(remaining, len(plan.objective_constants))),
        sources=[list(islice(remaining, _count(source.inputs))) for source in plan.sources],
    )


def _of_edits(
    plan: Plan, remaining: Iterator[Payload], stored: Mapping[str, StoredList]
) -> Iterator[Payload]:
    # A list that is named twice begins anew, and is always there as a whole.
    kept = {name: cycle(found.constants) for name, found in stored.items()}
    for request in plan.edits:
        source = kept[request.stored] if request.stored else remaining
        yield from islice(source, len(request.edit.constants))


def _count(inputs: Sequence[ArgumentInput]) -> int:
    return sum(1 if isinstance(entry, TensorInput) else len(entry.images) for entry in inputs)
