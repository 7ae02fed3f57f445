"""Positions of texts, as they are written, sent and shown."""

from typing import Any

import pytest
from google.protobuf import text_format

import trocar
from trocar_api.v1 import position_pb2 as pb


@pytest.mark.parametrize(
    ("clauses", "message"),
    [
        ({"prompt": "all"}, "prompt { all: true }"),
        ({"prompt": -1}, "prompt { list { positions: -1 } }"),
        ({"prompt": slice(None, 4, 2)}, "prompt { range { stop: 4 step: 2 } }"),
        ({"generated": slice(0, 8)}, "generated { range { start: 0 stop: 8 } }"),
        ({"spans": "cat"}, 'spans { text: "cat" }'),
        ({"spans": (0, 3)}, "spans { characters { start: 0 stop: 3 } }"),
        (
            {"spans": ["cat", (1, 3), trocar.span("dog")], "roles": "user"},
            'spans { text: "cat" } spans { characters { start: 1 stop: 3 } } spans { text: "dog" } '
            'spans { role: "user" }',
        ),
        ({"token_ids": 5}, "token_ids: 5"),
        ({"token_ids": range(2)}, "token_ids: 0 token_ids: 1"),
        (
            {"prompt": "all", "but_not": trocar.positions(prompt=[0])},
            "prompt { all: true } but_not { prompt { list { positions: 0 } } }",
        ),
    ],
)
def test_clauses_are_sent_as_they_are_written(clauses: dict[str, Any], message: str) -> None:
    expected = text_format.Parse(message, pb.Positions())
    assert trocar.positions(**clauses).to_wire() == expected
    assert trocar.tap("a", positions=trocar.positions(**clauses)).to_wire().positions == expected


@pytest.mark.parametrize(
    ("clauses", "error", "problem"),
    [
        ({"but_not": trocar.positions(prompt=[0])}, ValueError, "nothing is selected"),
        (
            {"prompt": "all", "but_not": trocar.positions(prompt=[0], but_not=trocar.positions(prompt=[1]))},
            ValueError,
            "of its own",
        ),
        ({"spans": 5}, TypeError, "int"),
        ({"spans": [5]}, TypeError, "a span is a text"),
        ({"spans": (3, 1)}, ValueError, "ends after its start"),
        ({"spans": trocar.span("a", decoder=True)}, TypeError, "give tokens="),
        ({"token_ids": "a"}, TypeError, "integer"),
    ],
)
def test_impossible_clauses_are_refused(
    clauses: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        trocar.positions(**clauses)


def test_an_edit_shows_its_positions_and_reads_them_from_json() -> None:
    mapping = {
        "prompt": [-1],
        "generated": "0:8",
        "spans": ["cat", [0, 3], {"role": "user"}],
        "roles": ["tool"],
        "token_ids": [4],
        "but_not": {"prompt": "1:2"},
    }
    edit = trocar.Edit.from_json({"at": "a", "op": "zero", "positions": mapping, "channels": [1]})
    written = trocar.edit(
        "a",
        "zero",
        channels=[1],
        positions=trocar.positions(
            prompt=[-1],
            generated=slice(0, 8),
            spans=["cat", (0, 3), trocar.span(role="user")],
            roles=["tool"],
            token_ids=[4],
            but_not=trocar.positions(prompt=slice(1, 2)),
        ),
    )
    assert edit == written
    assert repr(edit) == (
        "edit('a', 'zero', channels=[1], positions=trocar.positions(prompt=[-1], "
        "generated=slice(0, 8, None), spans=[trocar.span('cat'), trocar.span(0, 3), "
        "trocar.span(role='user'), trocar.span(role='tool')], "
        "token_ids=[4], but_not=trocar.positions(prompt=slice(1, 2, None))))"
    )
    for wrong in ({"at": [1]}, [1], {"spans": [{"word": "cat"}]}):
        with pytest.raises(TypeError):
            trocar.Edit.from_json({"at": "a", "op": "zero", "positions": wrong})
