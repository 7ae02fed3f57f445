"""Pass observer: the services report each finished pass to it.

extraction = await engine.extract(prepared, deadline)
note_pass(plan, extraction)
"""

import time

from trocar_server.engine.request.plan import Plan
from trocar_server.engine.run.extraction import Extraction
from trocar_server.telemetry.call_observer import PassFacts, current_call

_NANOSECONDS = 1_000_000_000


def note_pass(plan: Plan, extraction: Extraction) -> None:
    """Report a finished pass of the current call to its observer; no effect outside of calls."""
    call = current_call()
    if call is None:
        return
    facts = pass_facts(plan, extraction)
    call.pass_count += 1
    call.row_count += facts.row_count
    call.queue_s += facts.queue_s
    call.compute_s += facts.compute_s
    if call.phases is not None:
        now_ns = time.time_ns()
        began_ns = now_ns - int(facts.compute_s * _NANOSECONDS)
        call.add_phase("queue", began_ns - int(facts.queue_s * _NANOSECONDS), began_ns)
        call.add_phase("pass", began_ns, now_ns)
    call.observer.passed(call, facts)


def note_hit(model_id: str, row_count: int) -> None:
    """Report to the current call's observer that the feature cache answered it."""
    call = current_call()
    if call is None:
        return
    call.pass_count += 1
    call.row_count += row_count
    call.observer.passed(call, PassFacts(model_id, row_count, 0.0, 0.0, is_cached=True))


def pass_facts(plan: Plan, extraction: Extraction) -> PassFacts:
    """Facts of a pass."""
    report = extraction.report
    # Images, or the first dimension of the first argument.
    row_count = (1 if plan.inputs else 0) if plan.batch_size is None else plan.batch_size
    return PassFacts(
        plan.model_id,
        len(extraction.processed[0].samples) if extraction.processed else row_count,
        extraction.queue_s,
        extraction.compute_s,
        extraction.depth,
        report.engine,
        report.numerics.value,
        report.is_cached,
    )
