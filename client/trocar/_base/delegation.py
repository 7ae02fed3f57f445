"""Delegation: methods whose signature is declared elsewhere, for people, tools and type checkers alike."""

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from inspect import Parameter, Signature, iscoroutinefunction, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from trocar._base.names import name_hint

Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")
Method = Callable[Concatenate[Any, Arguments], Result]


def delegate(part: str, method: "Method[Arguments, Result]") -> "Method[Arguments, Result]":
    """Return a method that calls that of a part; signature, docstring and types are the part's.

        class Client:
            extract = delegate("_extraction", Extraction.extract)

    Args:
        part: The attribute that holds the part.
        method: A method of the part's class.
    """
    if iscoroutinefunction(method):  # its counterpart is one, too: unittest.mock and others ask

        @wraps(method)
        async def awaited(self: Any, /, *args: Any, **options: Any) -> Any:
            return await method(getattr(self, part), *args, **options)

        return cast("Method[Arguments, Result]", awaited)

    @wraps(method)
    def called(self: Any, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        return method(getattr(self, part), *args, **options)

    return called


def taking(
    options: Callable[Arguments, Options],
) -> Callable[[Callable[[Owner, Options], Result]], Callable[Concatenate[Owner, Arguments], Result]]:
    """Decorate a method of one object of options, so that it takes the arguments of which that is made.

        @taking(TrainerOptions)
        async def train(self, options: TrainerOptions) -> Trainer: ...

        await client.train("resnet18", head=10)

    Args:
        options: A class of options: its fields are the arguments, with their defaults.
    """
    arguments = [Parameter("self", Parameter.POSITIONAL_OR_KEYWORD), *signature(options).parameters.values()]

    def decorated(
        method: Callable[[Owner, Options], Result],
    ) -> Callable[Concatenate[Owner, Arguments], Result]:
        made: Any

        if iscoroutinefunction(method):

            @wraps(method)
            async def awaited(self: Owner, /, *args: Any, **given: Any) -> Any:
                _check_names(method, given, arguments)
                return await method(self, options(*args, **given))

            made = awaited
        else:

            @wraps(method)
            def called(self: Owner, /, *args: Any, **given: Any) -> Result:
                _check_names(method, given, arguments)
                return method(self, options(*args, **given))

            made = called
        made.__signature__ = Signature(arguments, return_annotation=signature(method).return_annotation)
        return cast("Callable[Concatenate[Owner, Arguments], Result]", made)

    return decorated


def _check_names(
    method: Callable[..., Any], given: Mapping[str, Any], arguments: Sequence[Parameter]
) -> None:
    """Refuse an unknown argument.

    Raises:
        TypeError: With the nearest names; Python's own message would name the class of options.
    """
    known = [argument.name for argument in arguments[1:]]
    wrong = next((name for name in given if name not in known), None)
    if wrong is not None:
        raise TypeError(f"{method.__name__} has no argument {wrong!r}; {name_hint(wrong, known)}")
