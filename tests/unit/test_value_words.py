"""Why a value is refused, in own words, for every kind of refusal that pydantic has for our settings."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trocar_api.value_words import nearest_word, not_one_of, refusals
from trocar_server.config import read_config
from trocar_server.errors import ServiceError


class Part(BaseModel):
    """A table inside another."""

    size: int = 1


class Settings(BaseModel):
    """One setting of each kind."""

    model_config = ConfigDict(extra="forbid")

    whole: int = 1
    number: float = 1.0
    flag: bool = False
    text: str = ""
    sizes: tuple[int, ...] = ()
    names: Annotated[tuple[str, ...], Field(min_length=1)] = ("a",)
    table: dict[str, int] = {}
    word: Literal["exact", "fast", "bf16"] = "exact"
    bounded: Annotated[int, Field(ge=1, le=5)] = 1
    open_bound: Annotated[float, Field(gt=0, lt=1)] = 0.5
    finite: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    either: int | str = 1
    many: tuple[str, ...] | str | None = None
    part: Part = Part()


def words(**given: Any) -> str:
    with pytest.raises(ValidationError) as caught:
        Settings(**given)
    return "; ".join(f"{'.'.join(map(str, place))} {why}" for place, why in refusals(caught.value.errors()))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"whole": "x"}, "whole must be a whole number, not 'x'"),
        ({"whole": 1.5}, "whole must be a whole number, not 1.5"),
        ({"whole": None}, "whole must be a whole number, not None"),
        ({"whole": [1]}, "whole must be a whole number"),
        ({"whole": "1" * 5000}, "whole must be a whole number"),
        ({"number": "x"}, "number must be a number, not 'x'"),
        ({"flag": "maybe"}, "flag must be true or false, not 'maybe'"),
        ({"flag": 3}, "flag must be true or false, not 3"),
        ({"text": 3}, "text must be a text, not 3"),
        ({"text": True}, "text must be a text, not true"),
        ({"sizes": 3}, "sizes must be a list, not 3"),
        ({"sizes": [1, "x"]}, "sizes.1 must be a whole number, not 'x'"),
        ({"names": []}, "names must have at least 1 entry"),
        ({"table": 3}, "table must be a table of names and values, not 3"),
        ({"table": {"a": "x"}}, "table.a must be a whole number, not 'x'"),
        ({"word": "fst"}, "word must be one of exact, fast, bf16, not 'fst'; nearest: fast"),
        ({"word": "FAST"}, "word must be one of exact, fast, bf16, not 'FAST'; nearest: fast"),
        ({"word": 5}, "word must be one of exact, fast, bf16, not 5"),
        ({"bounded": 9}, "bounded must be at most 5, not 9"),
        ({"bounded": 0}, "bounded must be at least 1, not 0"),
        ({"open_bound": 1}, "open_bound must be less than 1, not 1"),
        ({"open_bound": 0.0}, "open_bound must be more than 0, not 0.0"),
        ({"finite": float("nan")}, "finite must be a finite number, not nan"),
        ({"either": [1]}, "either must be a whole number or a text"),
        ({"many": 3}, "many must be a list or a text, not 3"),
        ({"part": 3}, "part must be a table of names and values, not 3"),
        ({"part": {"size": "x"}}, "part.size must be a whole number, not 'x'"),
        ({"whle": 3}, "whle is unknown"),
        (
            {"whole": "x", "flag": 3},
            "whole must be a whole number, not 'x'; flag must be true or false, not 3",
        ),
    ],
)
def test_a_refusal_is_in_own_words(given: dict[str, Any], expected: str) -> None:
    assert words(**given) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [("cross_entrpy", "cross_entropy"), ("MSE", "mse"), ("zebra", ""), (None, ""), (3, "")],
)
def test_the_nearest_word_ignores_case(value: object, expected: str) -> None:
    assert nearest_word(value, ["cross_entropy", "mse", "l1"]) == expected


def test_a_long_value_is_not_repeated() -> None:
    assert not_one_of("x" * 100, ["a", "b"]) == "must be one of a, b"


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"port": "abc"}, "port must be a whole number, not 'abc'"),
        ({"port": 99999}, "port must be at most 65535, not 99999"),
        ({"engine": {"numerics": "fst"}}, "engine.numerics must be one of exact, fast, bf16, not 'fst'"),
        ({"models": {"a": {"replicas": 0}}}, "models.a.replicas must be at least 1, not 0"),
        ({"models": {"a": {"categories": 3}}}, "models.a.categories must be a list or a text, not 3"),
        ({"models": {"a": 3}}, "models.a must be a table of names and values, not 3"),
        (
            {"limits": {"max_reply_bytes": "1 zillion"}},
            "limits.max_reply_bytes must be a number of bytes or a size",
        ),
        (
            {"limits": {"max_repy_bytes": 3}},
            "limits.max_repy_bytes: no such setting; nearest: max_reply_bytes",
        ),
    ],
)
def test_a_configuration_is_refused_in_the_same_words(settings: dict[str, Any], expected: str) -> None:
    with pytest.raises(ServiceError) as caught:
        read_config(None, **settings)
    assert expected in caught.value.message
    assert "Input should" not in caught.value.message
