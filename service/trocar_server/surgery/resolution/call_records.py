"""Call records: modules, fx nodes or functions with their calls in one pass, for selectors to look up."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, unknown
from trocar_server.surgery.recording.recording import ModuleRecord, Recording, structure_of
from trocar_server.surgery.recording.second_names import NONE, SecondNames
from trocar_server.surgery.resolution.suggestions import suggestion
from trocar_server.surgery.selectors.naming import shown_path
from trocar_server.surgery.selectors.selectors import Selector


@dataclass(frozen=True)
class Records:
    """The records of one kind, with the terms for error messages.

    Attributes:
        kind: `module`, `fx` or `fn`, as in a target.
        noun: The term for one record in errors.
        by_path: The records.
        unknown: The error reason for a name that does not exist.
        advice: Advice when there is no near name.
        also: Other names that are accepted, too.
        second_names: Further names of modules.
    """

    kind: str
    noun: str
    by_path: Mapping[str, ModuleRecord]
    unknown: ErrorReason
    advice: str
    also: tuple[str, ...] = ()
    second_names: SecondNames = NONE

    def matching(self, selector: Selector) -> list[ModuleRecord]:
        """Return the records that a selector's path and class match, called or not.

        Raises:
            ServiceError: There is none: `UNKNOWN_MODULE`, `UNKNOWN_NODE` or `UNKNOWN_FUNCTION`.
        """
        if selector.is_everything:
            return self._leaves()
        if not selector.is_pattern:
            path = self.second_names.first(selector.path)
            if path in self.by_path:
                return [self.by_path[path]]
            raise self._unknown(selector)
        known = structure_of(self.by_path).values()
        result = [
            self.by_path[record.path] for record in known if record.path and self._is_match(selector, record)
        ]
        if not result:
            raise self._no_match(selector)
        return result

    def _is_match(self, selector: Selector, record: ModuleRecord) -> bool:
        return any(selector.matches(path, record.type_name) for path in self.second_names.of(record.path))

    def _unknown(self, selector: Selector) -> ServiceError:
        hint = suggestion(selector, self.by_path) if self.kind == "module" else ""
        if hint:
            return ServiceError(
                self.unknown, f"no {self.noun} '{selector.path}'; {hint}", selector=selector.text, nearest=""
            )
        names = [*self.by_path, *self.second_names.firsts, *self.also]
        return unknown(self.unknown, self.noun, selector.path, names, self.advice)

    def _leaves(self) -> list[ModuleRecord]:
        """Return the called modules without called submodules; of nodes and functions, all."""
        if self.kind != "module":
            return list(self.by_path.values())
        known = structure_of(self.by_path)
        calls = sorted((call.started, call.ended, r.path) for r in known.values() for call in r.calls)
        callers: set[str] = set()
        open_calls: list[tuple[int, str]] = []
        for started, ended, path in calls:
            while open_calls and open_calls[-1][0] < started:
                open_calls.pop()
            callers |= {caller for _, caller in open_calls[-1:] if caller != path}
            open_calls.append((ended, path))
        return [self.by_path[path] for path, record in known.items() if record.calls and path not in callers]

    def _no_match(self, selector: Selector) -> ServiceError:
        hint = self.advice
        of_path = [r for r in self.by_path.values() if r.path and selector.matches_path(r.path)]
        if selector.type_name is not None and of_path:
            types = sorted({record.type_name for record in of_path})
            classes = f"{', '.join(types[:10])}{', ...' if len(types) > 10 else ''}"
            hint = suggestion(selector, self.by_path) or f"the modules of that path are {classes}"
        elif selector.kind == "regex" and selector.text.startswith(f"re:{selector.path}"):
            hint += (
                "; the expression must match a whole path, and before `@call`, `#order`, `/port` or `[pick]` "
                "it is written in double quotes"
            )
        return ServiceError(
            self.unknown, f"'{selector.text}' matches no {self.noun}; {hint}", selector=selector.text
        )


def modules_of(recording: Recording) -> Records:
    """Return the records of a recording's modules."""
    return Records(
        kind="module",
        noun="module",
        by_path=recording.modules,
        unknown=ErrorReason.UNKNOWN_MODULE,
        advice="`trocar modules` lists them",
        also=tuple(recording.stages),
        second_names=recording.second_names,
    )


def nodes_of(nodes: Mapping[str, ModuleRecord]) -> Records:
    """Return the records of fx nodes by name."""
    return Records(
        kind="fx",
        noun="node",
        by_path=nodes,
        unknown=ErrorReason.UNKNOWN_NODE,
        advice="their names are those of torchvision's get_graph_node_names; `fx:**` is all of them",
    )


def functions_of(functions: Mapping[str, ModuleRecord]) -> Records:
    """Return the records of functions by name."""
    return Records(
        kind="fn",
        noun="function",
        by_path=functions,
        unknown=ErrorReason.UNKNOWN_FUNCTION,
        advice=f"this pass calls {_listed(functions)}",
    )


def _listed(names: Mapping[str, ModuleRecord], count: int = 20) -> str:
    shown = [shown_path(name) for name in names][:count]
    return ", ".join(chain(shown, ["..."] if len(names) > count else [])) or "none"
