"""Call counts: the numbers of calls that a request's meaning depends on.

# Note: [Data-dependent calls]
After a recording on data it is unknown whether other data calls a module as often. The meaning of a request
may depend on that: `@*` and `@-1`, a pattern, and `block` without a call, valid where there is one.
So such a pass runs to its end and its calls are counted; where the counts differ the request is resolved
again on a recording of its own data. `block@0` means the same for any data, and may end the pass early.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trocar_server.engine.execute.collecting import CallCounts
from trocar_server.surgery import Recording, Selector, Skips, attention_names, parse_selector
from trocar_server.surgery.recording.recording import structure_of


def uncertain(selectors: Iterable[Selector], recording: Recording) -> list[Selector]:
    """Return the selectors whose meaning depends on the number of calls; see Note: [Data-dependent calls]."""
    if recording.is_symbolic:
        return []
    staged = recording.stages
    unstaged = (parse_selector(staged[s.path]) if s.path in staged else s for s in selectors)
    first = recording.second_names.first
    named = (
        selector if selector.is_pattern else replace(selector, path=first(selector.path))
        for selector in unstaged
    )
    return [selector for selector in named if selector.depends_on_calls]


def calls_of(selectors: Sequence[Selector], recording: Recording, skips: Skips | None = None) -> CallCounts:
    """Return how often a recorded pass calls what uncertain selectors may mean.

    Args:
        selectors: The selectors.
        recording: Of a pass without skips.
        skips: The calls that the pass leaves out; None for none.
    """
    functions = {selector.path for selector in selectors if selector.kind == "fn"}
    records = recording.of_kind("fn")
    if any(selector.is_attention for selector in selectors):
        functions |= attention_names(records)
    of_functions = {("fn", name): len(records[name].calls) if name in records else 0 for name in functions}
    names = recording.second_names.of
    of_modules = {
        ("module", path): len(record.calls) - (skips.missing(record.calls) if skips else 0)
        for path, record in structure_of(recording.modules).items()
        if any(
            s.order is not None or any(s.matches(name, record.type_name) for name in names(path))
            for s in selectors
            if s.kind != "fn"
        )
    }
    return of_modules | of_functions
