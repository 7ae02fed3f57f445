"""How lines look: read back with the parsers of others."""

import io
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from trocar_server.app.log_format import set_up_logging


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    before = structlog.get_config()
    yield
    structlog.configure(**before)


def written(log_format: str, **facts: Any) -> str:
    stream = io.StringIO()
    set_up_logging(log_format, stream)
    log = structlog.get_logger("test")
    log.debug("unseen")
    log.info("call", **facts)
    return stream.getvalue()


@pytest.mark.parametrize(
    "value", ["plain", 'with "quotes"', "two\nlines", "a=b", "", "\x1b[31m", "café", 1.5, None]
)
def test_json_is_one_object_in_one_line(value: object) -> None:
    text = written("json", code="OK", value=value)
    assert text.count("\n") == 1
    line = json.loads(text)
    assert (line["event"], line["level"], line["code"], line["value"]) == ("call", "info", "OK", value)
    assert line["timestamp"].endswith("Z")


@pytest.mark.parametrize("value", ["plain", "with spaces", "two\nlines", "a=b"])
def test_text_is_one_line_of_pairs(value: str) -> None:
    text = written("text", code="OK", value=value)
    assert text.count("\n") == 1
    pairs = dict(word.split("=", 1) for word in shlex.split(text))
    assert (pairs["event"], pairs["code"]) == ("call", "OK")
    assert pairs["value"].startswith(value.split(maxsplit=1)[0])


def test_json_takes_what_json_does_not_know() -> None:
    assert json.loads(written("json", value={1}))["value"] == "{1}"


def test_an_exception_stays_in_one_line_of_json() -> None:
    stream = io.StringIO()
    set_up_logging("json", stream)
    try:
        raise ValueError("no\nway")
    except ValueError as error:
        structlog.get_logger("test").error("defect", exc_info=error)
    assert stream.getvalue().count("\n") == 1
    assert "ValueError: no\nway" in json.loads(stream.getvalue())["exception"]


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_the_event_comes_first(log_format: str) -> None:
    text = written(log_format, code="OK")
    first = next(iter(json.loads(text))) if log_format == "json" else text.partition("=")[0]
    assert first == "event"
