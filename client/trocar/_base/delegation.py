"""Delegation: methods whose signature is declared elsewhere, for people, tools and type checkers alike."""

from collections.abc import Callable, Mapping, Sequence
from dis import opmap
from functools import wraps
from inspect import Parameter, Signature, iscoroutinefunction, signature
from typing import Any, Concatenate, ParamSpec, TypeVar, cast

from trocar._base.argument_mistakes import argument_hint, argument_mistake
from trocar._base.error_base import TrocarError

Arguments = ParamSpec("Arguments")
Owner = TypeVar("Owner")
Options = TypeVar("Options")
Result = TypeVar("Result")
Method = Callable[Concatenate[Any, Arguments], Result]


def delegate(part: str, method: "Method[Arguments, Result]") -> "Method[Arguments, Result]":
    """Return a method that calls that of a part; signature, docstring and types are the part's.

        class Client:
            extract = delegate("_extraction", Extraction.extract)

    A traceback of a failed call ends here: see Note: [Short tracebacks].

    Args:
        part: The attribute that holds the part.
        method: A method of the part's class.
    """
    if iscoroutinefunction(method):  # its counterpart is one, too: unittest.mock and others ask

        @wraps(method)
        async def awaited(self: Any, /, *args: Any, **options: Any) -> Any:
            try:
                return await method(getattr(self, part), *args, **options)
            except _MISTAKES as error:
                raise _for_caller(error, method, args, options)  # noqa: B904 - its own cause stays

        return cast("Method[Arguments, Result]", awaited)

    @wraps(method)
    def called(self: Any, /, *args: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return method(getattr(self, part), *args, **options)
        except _MISTAKES as error:
            raise _for_caller(error, method, args, options)  # noqa: B904 - its own cause stays

    return called


# Note: [Short tracebacks]
# An error of a call says what is wrong and how to mend it: an unknown model, say. Where inside the client it
# was raised does not matter, so its traceback has the caller's frames and one of ours. Errors that may be a
# defect of this client or of the server keep all frames: built-in ones that no `raise` of ours began, too.
_WHOLE = ("InternalServerError", "BadReplyError")
"""Names of errors with all frames."""
_MISTAKES = (TrocarError, TypeError, ValueError, OSError)
"""Errors that a caller's mistake raises."""
_RAISE = opmap["RAISE_VARARGS"]


def _for_caller(
    error: Exception, method: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Exception:
    """Return an error as the caller of a method sees it."""
    if isinstance(error, TrocarError):
        return error if type(error).__name__ in _WHOLE else error.with_traceback(None)
    if _is_raised_here(error):
        return error.with_traceback(None)
    wrong = argument_mistake(method, args, options) if isinstance(error, TypeError) else ""
    if not wrong:
        return error
    mistake = TypeError(wrong)
    mistake.__suppress_context__ = True
    return mistake


def _is_raised_here(error: Exception) -> bool:
    """Whether a `raise` of this package began an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or trace.tb_lasti < 0:
        return False
    is_own = str(trace.tb_frame.f_globals.get("__name__", "")).partition(".")[0] == "trocar"
    return is_own and trace.tb_frame.f_code.co_code[trace.tb_lasti] == _RAISE


def explained(function: "Callable[Arguments, Result]") -> "Callable[Arguments, Result]":
    """Decorate a public function or method: mistakes in its arguments are named, and tracebacks are short.

    See Note: [Short tracebacks].
    """
    first = int("self" in signature(function).parameters)
    if iscoroutinefunction(function):

        @wraps(function)
        async def awaited(*args: Any, **options: Any) -> Any:
            try:
                return await function(*args, **options)
            except _MISTAKES as error:
                raise _told(error, function, args[first:], options)  # noqa: B904 - a defect keeps its cause

        return cast("Callable[Arguments, Result]", awaited)

    @wraps(function)
    def called(*args: Arguments.args, **options: Arguments.kwargs) -> Result:
        try:
            return function(*args, **options)
        except _MISTAKES as error:
            raise _told(error, function, args[first:], options)  # noqa: B904 - a defect keeps its cause

    return called


def _told(
    error: Exception, function: Callable[..., Any], args: Sequence[Any], options: Mapping[str, Any]
) -> Exception:
    """Return an error as the caller of a function sees it: without the cause that its message names."""
    shown = _for_caller(error, function, args, options)
    if isinstance(shown, TrocarError) and type(shown).__name__ not in _WHOLE:
        shown.__cause__, shown.__suppress_context__ = None, True
    return shown


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
        raise TypeError(f"{method.__name__} has no argument {wrong!r}; {argument_hint(wrong, known)}")
