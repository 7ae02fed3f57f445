"""Suggestions for a selector that matches nothing: how its likely meaning is written.

fc.weight      # a parameter: 'fc/param(weight)'
layer[34]      # a set of characters: 're:layer[34]'
layer4:mean    # a statistic: trocar.tap('layer4', stats=['mean'])
"""

from collections.abc import Iterator, Mapping

from trocar_server.surgery.recording.recording import ModuleRecord
from trocar_server.surgery.selectors.naming import canonical_name, shown_path
from trocar_server.surgery.selectors.regexes import InvalidPatternError, check_pattern, matches_whole
from trocar_server.surgery.selectors.selectors import Selector
from trocar_server.tensors.stats.statistic import Statistic

_PORTS = {
    "out": "out",
    "output": "out",
    "in": "in",
    "input": "in",
    "pattern": "pattern",
    "attention": "pattern",
    "logits": "logits",
}
"""Ports by the word that callers write behind a dot."""
_POOLING = frozenset(("avg", "pool", "avgpool"))
_OF_EXPRESSIONS = frozenset("[](){}?^$|+\\")
"""Characters of shells' patterns and of regular expressions that names of modules rarely have."""


def suggestion(selector: Selector, modules: Mapping[str, ModuleRecord]) -> str:
    """Return how the likely meaning of a selector without matches is written; empty if none is likely."""
    if selector.type_name is not None:
        return _option(selector.path, selector.type_name, "`:` filters by class; ")
    owner, _, name = selector.path.rpartition(".")
    if owner in modules and not selector.is_pattern:
        return _part(modules[owner], name) or _option(owner, name) or _expression(selector, modules)
    return _expression(selector, modules)


def _part(record: ModuleRecord, name: str) -> str:
    """Return the port of a parameter, buffer or value that was written like a submodule."""
    if name in record.parameters:
        kind = "buffer" if name in record.buffers else "parameter"
        return f"the {kind} is '{canonical_name(record.path, None, f'param({name})', ())}'"
    port = _PORTS.get(name.lower())
    return "" if port is None or not record.path else f"the port is '{shown_path(record.path)}/{port}'"


def _option(path: str, word: str, reason: str = "") -> str:
    """Return the option of a tap that was written like a class or a submodule."""
    if not path:
        return ""
    name = word.lower()
    if name in {str(statistic) for statistic in Statistic}:
        return f"{reason}statistics are options of a tap: trocar.tap('{path}', stats=['{name}'])"
    if name in _POOLING:
        return f"{reason}pooling is an option of a tap: trocar.tap('{path}', reduce=trocar.pool('avg'))"
    return ""


def _expression(selector: Selector, modules: Mapping[str, ModuleRecord]) -> str:
    """Return the regular expression that a selector looks like, if it matches modules."""
    if selector.kind != "module" or not _OF_EXPRESSIONS.intersection(selector.text):
        return ""
    for expression in _expressions(selector.text):
        if any(path and matches_whole(expression, path) for path in modules):
            return f"a regular expression begins with `re:`: 're:{expression}'"
    return ""


def _expressions(text: str) -> Iterator[str]:
    """Yield valid regular expressions that a text may stand for: itself, and a shell's pattern."""
    shell = text.replace("{", "(").replace("}", ")").replace(",", "|").replace("?", ".")
    for expression in dict.fromkeys((text, shell)):
        try:
            check_pattern(expression)
        except (InvalidPatternError, UnicodeEncodeError):
            continue
        yield expression
