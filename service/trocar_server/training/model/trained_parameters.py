"""Parameter and module selectors.

    select_parameters(model, ("layer4", "fc.*", "**:BatchNorm2d"), "trainable")

A module selects all of its parameters, including those of submodules. Qualified names as in
`named_parameters` work as well, with the same `*` and `**`: `fc.bias`, `layer4.**.weight`, `fc.*`. So do
classes, `re:` and parameter ports, `fc/param(weight)`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, nearest
from trocar_server.surgery import Selector, parse_selector
from trocar_server.surgery.selectors.naming import ALL_PARAMETERS

NO_STAGES: Mapping[str, str] = {}
"""An empty stage map."""


@dataclass(frozen=True)
class Names:
    """Names that selectors are matched against.

    Attributes:
        modules: Class names by module path.
        parameters: The first name of each parameter by each of its names: tied ones have several.
        stages: Selectors by stage name.
    """

    modules: Mapping[str, str]
    parameters: Mapping[str, str]
    stages: Mapping[str, str]

    @classmethod
    def of_module(cls, module: nn.Module, stages: Mapping[str, str] = NO_STAGES) -> "Names":
        """Return the names of a tree of modules."""
        modules = {path: type(part).__name__ for path, part in module.named_modules(remove_duplicate=False)}
        first: dict[int, str] = {}
        parameters = {
            name: first.setdefault(id(parameter), name)
            for name, parameter in module.named_parameters(remove_duplicate=False)
        }
        return cls(modules, parameters, stages)

    @classmethod
    def of_trained(
        cls, named: Mapping[str, object], module: nn.Module | None, stages: Mapping[str, str] = NO_STAGES
    ) -> "Names":
        """Return the names of a tree, or, without one, those derived from parameter names."""
        return cls.of_parameters(named) if module is None else cls.of_module(module, stages)

    @classmethod
    def of_parameters(cls, names: Iterable[str]) -> "Names":
        """Return the names derived from parameter names alone: modules by path, without their classes."""
        parameters = {name: name for name in names}
        modules = {"": ""}
        for name in parameters:
            parts = name.split(".")[:-1]
            modules.update({".".join(parts[:end]): "" for end in range(1, len(parts) + 1)})
        return cls(modules, parameters, NO_STAGES)


def select_parameters(
    module: nn.Module, selectors: Sequence[str], field: str, stages: Mapping[str, str] = NO_STAGES
) -> tuple[str, ...]:
    """Return the names of the selected parameters, in the order of `named_parameters`.

    A parameter with several names (tied) is listed once, by its first. See `Names` for stages.

    Raises:
        ServiceError: A selector matches no parameter (`UNKNOWN_PARAMETER`, with near names) or is malformed
            (`INVALID_SELECTOR`); the message begins with `field`.
    """
    return select_names(Names.of_module(module, stages), selectors, field)


def select_names(names: Names, selectors: Sequence[str], field: str) -> tuple[str, ...]:
    """As `select_parameters`, on a set of names."""
    result: set[str] = set()
    for index, text in enumerate(selectors):
        result |= match_parameters(names, text, f"{field}[{index}]")
    return tuple(name for name, first in names.parameters.items() if name == first and name in result)


def select_modules(
    module: nn.Module, selectors: Sequence[str], field: str, stages: Mapping[str, str] = NO_STAGES
) -> tuple[str, ...]:
    """Return the paths of the selected modules, in the order of `named_modules`: of each the first.

    Raises:
        ServiceError: A selector matches no module (`UNKNOWN_MODULE`) or is malformed (`INVALID_SELECTOR`).
    """
    names = Names.of_module(module, stages)
    result: set[str] = set()
    for index, text in enumerate(selectors):
        where = f"{field}[{index}]"
        selector = _parse(text, names, where)
        matched = _modules(names, selector)
        if selector.parameter is not None or not matched:
            raise _no_match(where, text, ErrorReason.UNKNOWN_MODULE, "module", names.modules)
        result |= matched
    chosen = {id(part) for path, part in module.named_modules(remove_duplicate=False) if path in result}
    return tuple(path for path, part in module.named_modules() if id(part) in chosen)


def match_parameters(names: Names, text: str, field: str) -> frozenset[str]:
    """Return the first names of the parameters that one selector matches.

    Raises:
        ServiceError: See `select_parameters`.
    """
    selector = _parse(text, names, field)
    own = selector.parameter
    result: set[str] = set()
    modules = _modules(names, selector)
    for name, first in names.parameters.items():
        path, _, last = name.rpartition(".")
        if own is not None:
            is_meant = path in modules and own in (last, ALL_PARAMETERS)
        else:
            is_name = selector.type_name is None and selector.matches_path(name)
            is_meant = is_name or _is_inside(path, modules)
        if is_meant:
            result.add(first)
    if result:
        return frozenset(result)
    if modules:
        raise ServiceError(
            ErrorReason.UNKNOWN_PARAMETER,
            f"{field}: '{text}' is a module without floating-point parameters; choose one that has weights",
            selector=text,
        )
    raise _no_match(
        field, text, ErrorReason.UNKNOWN_PARAMETER, "parameter", [*names.modules, *names.parameters]
    )


def is_of_values(text: str) -> bool:
    """Whether a selector names the gradient at a value of a pass, `layer4/grad_out`, not parameters.

    Raises:
        ServiceError: `INVALID_SELECTOR`.
    """
    selector = parse_selector(text)
    return selector.is_gradient and selector.parameter is None


def _parse(text: str, names: Names, field: str) -> Selector:
    try:
        selector = parse_selector(text)
        if _is_stage(selector, names):
            selector = parse_selector(names.stages[selector.path])
    except ServiceError as error:
        raise ServiceError(error.reason, f"{field}: {error.message}", **error.details) from None
    is_of_pass = (
        selector.call is not None
        or selector.order is not None
        or bool(selector.picks)
        or selector.is_every_stage
    )
    has_port = selector.is_gradient or selector.port != "out" or text.endswith("/out")
    is_port = selector.parameter is None and has_port
    if selector.kind in ("fx", "fn") or is_of_pass or is_port:
        raise ServiceError(
            ErrorReason.INVALID_SELECTOR,
            f"{field}: '{text}' selects a value of a pass; select modules or parameters, for example "
            "'layer4', 'fc.bias', 'layer4.**.weight'",
            selector=text,
        )
    return selector


def _is_stage(selector: Selector, names: Names) -> bool:
    """Whether a selector is the name of a stage: a module of that name takes precedence."""
    is_name = selector.kind == "module" and selector.type_name is None and not selector.quoted
    return is_name and selector.path in names.stages and selector.path not in names.modules


def _modules(names: Names, selector: Selector) -> set[str]:
    if not selector.is_pattern:
        return {selector.path} & names.modules.keys()
    return {path for path, kind in names.modules.items() if path and selector.matches(path, kind)}


def _is_inside(path: str, modules: Collection[str]) -> bool:
    """Whether a module is one of these or inside one."""
    while True:
        if path in modules:
            return True
        if not path:
            return False
        path = path.rpartition(".")[0]


def _no_match(field: str, text: str, reason: ErrorReason, noun: str, names: Iterable[str]) -> ServiceError:
    hints = nearest(text, [name for name in names if name])
    rest = f"nearest: {', '.join(hints)}" if hints else "`trocar modules` lists them"
    return ServiceError(
        reason,
        f"{field}: '{text}' matches no {noun}; {rest}",
        selector=text,
        nearest=", ".join(hints),
    )


def trained_parameters(
    module: nn.Module,
    selectors: Sequence[str],
    head_path: str | None = None,
    stages: Mapping[str, str] = NO_STAGES,
) -> tuple[str, ...]:
    """Return the names of the trained parameters, in the order of `named_parameters`.

    Args:
        module: The trainer's module tree, with its new head.
        selectors: `trainable` of the spec; all floating-point parameters when empty.
        head_path: Path of a new head, which is always trained.
        stages: Selectors by stage name.

    Raises:
        ServiceError: See `select_parameters`; `UNKNOWN_PARAMETER` also where a selector matches none that
            can be trained.
    """
    chosen = set(select_parameters(module, selectors, "trainable", stages))
    every = dict(module.named_parameters())
    floats = [name for name, parameter in every.items() if parameter.is_floating_point()]
    for index, text in enumerate(selectors if len(floats) < len(every) else ()):
        matched = select_parameters(module, (text,), "trainable", stages)
        if set(matched).isdisjoint(floats):
            raise _untrainable(index, text, every[matched[0]])
    inside = "" if head_path is None else f"{head_path}."
    return tuple(
        name for name in floats if not selectors or name in chosen or (inside and name.startswith(inside))
    )


def _untrainable(index: int, text: str, parameter: nn.Parameter) -> ServiceError:
    kind = str(parameter.dtype).removeprefix("torch.")
    return ServiceError(
        ErrorReason.UNKNOWN_PARAMETER,
        f"trainable[{index}]: '{text}' matches parameters of {kind}, and only floating-point ones are "
        "trained; leave it out, or choose others",
        selector=text,
    )
