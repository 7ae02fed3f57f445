"""`--edit`: every form gives what `trocar.edit` gives."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

import trocar
from trocar._cli.options.edit_options import parse_edits


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("layer3 zero", trocar.edit("layer3", "zero")),
        ("  layer3   scale 0.0  channels=1,2 ", trocar.edit("layer3", "scale", 0.0, channels=[1, 2])),
        ("layer3 scale factor=2 channels=1:3", trocar.edit("layer3", "scale", 2, channels=slice(1, 3))),
        ("layer3 zero channels=-1", trocar.edit("layer3", "zero", channels=[-1])),
        ("layer3 zero index=:,3:8,...", trocar.edit("layer3", "zero", index=np.s_[:, 3:8, ...])),
        ("layer3 zero index=0,1", trocar.edit("layer3", "zero", index=np.s_[0, 1])),
        ("relu@0/grad_out clamp low=0", trocar.edit("relu@0/grad_out", "clamp", low=0)),
        ("relu clamp -1 1", trocar.edit("relu", "clamp", -1, 1)),
        ("layer3 scale .5", trocar.edit("layer3", "scale", 0.5)),
        ("layer3 scale 5.", trocar.edit("layer3", "scale", 5.0)),
        ("layer3 scale +1", trocar.edit("layer3", "scale", 1)),
        ("layer3 scale +1e-3", trocar.edit("layer3", "scale", 0.001)),
        ("relu clamp -.5 +.5e1", trocar.edit("relu", "clamp", -0.5, 5.0)),
        ("layer3 zero channels=+1", trocar.edit("layer3", "zero", channels=[1])),
        ("fc/in add .5,1.,+2", trocar.edit("fc/in", "add", [0.5, 1.0, 2])),
        ("fc/in add 1,2,3", trocar.edit("fc/in", "add", [1, 2, 3])),
        ("fc/in add [[1,2],[3,4]]", trocar.edit("fc/in", "add", [[1, 2], [3, 4]])),
        ("conv noise 0.5 uniform seed=7", trocar.edit("conv", "noise", 0.5, "uniform", seed=7)),
        ("conv top_k 3 absolute=true", trocar.edit("conv", "top_k", 3, absolute=True)),
        ("conv top_k 3 absolute=True", trocar.edit("conv", "top_k", 3, absolute=True)),
        ("conv cast float16 order=after", trocar.edit("conv", "cast", "float16", order="after")),
        ("a swap clean b", trocar.edit("a", "swap", "clean", "b")),
        ("a swap from=b", trocar.edit("a", "swap", at="b")),
        ("a swap at=b", trocar.edit("a", "swap", at="b")),
        ('parts."a b"/in zero', trocar.edit('parts."a b"/in', "zero")),
        (r'"a\" b" zero', trocar.edit(r'"a\" b"', "zero")),
        ('{"at": "layer3", "op": "scale", "factor": 0}', trocar.edit("layer3", "scale", 0)),
    ],
)
def test_the_compact_form_is_the_edit(text: str, expected: trocar.Edit) -> None:
    assert parse_edits([text]) == [expected]


def test_several_come_in_their_order() -> None:
    texts = ["a zero", '[{"at": "b", "op": "zero"}, "ablate-3"]', "ablate-4"]
    assert parse_edits(texts) == [trocar.edit("a", "zero"), trocar.edit("b", "zero"), "ablate-3", "ablate-4"]
    assert parse_edits(None) == []


def test_a_file_has_one_edit_or_a_list(tmp_path: Path) -> None:
    path = tmp_path / "edits.json"
    path.write_text('[{"at": "a", "op": "zero"}, {"at": "b", "op": "skip"}]')
    assert parse_edits([f"@{path}"]) == [trocar.edit("a", "zero"), trocar.edit("b", "skip")]


def test_arrays_come_from_files(tmp_path: Path) -> None:
    direction = np.arange(4, dtype=np.float32)
    np.save(tmp_path / "d.npy", direction)
    found = parse_edits([f"layer3 steer @{tmp_path / 'd.npy'} alpha=2 keep_norm=true"])
    assert found == [trocar.edit("layer3", "steer", direction, alpha=2, keep_norm=True)]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("layer3 scael 0", "no operation 'scael'; did you mean scale"),
        ("layer3 scale 0 chanels=1", "no 'chanels'; did you mean channels"),
        ("layer3 scale 0 1", "scale takes factor; 2 values are given"),
        ("layer3 zero 1", "zero takes no value; 1 values are given"),
        ("layer3 scale 0 factor=1", "factor is given twice"),
        ("layer3 clamp low=1 low=2", "low is given twice"),
        ("layer3 clamp low=1 2", "'2' comes after options"),
        ("layer3 scale", "factor"),
        ("layer3 scale nan", "a number or an array, not 'nan'"),
        ("layer3 scale NaN", "finite"),
        ("layer3 scale Infinity", "finite"),
        ("layer3 scale 5.e999", "a number or an array, not '5.e999'"),
        ("layer3 scale .", "a number or an array, not '.'"),
        ("layer3 scale ++1", "a number or an array, not '++1'"),
        ("layer3 scale 1 channels=a", "channels"),
        ("layer3 scale @x.txt", "no .npy file"),
        ("layer3 scale @no.npy", "No such file"),
        ("Layer3", "cannot be the name of stored edits"),
        ("@no.json", "No such file"),
        ("{", "it is not JSON: Expecting property name"),
        ('{"at": "a", "op": "scale", "factr": 1}', "no 'factr'; did you mean factor"),
        ('{"op": "zero"}', "an edit has at"),
        ("[3]", "edit 0 of the list"),
    ],
)
def test_what_is_no_edit_is_a_usage_error_that_shows_it(text: str, message: str) -> None:
    with pytest.raises(typer.BadParameter) as caught:
        parse_edits(["a zero", text])
    assert f"--edit {text!r}: " in caught.value.message
    assert message in caught.value.message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[", b"[" * 100_000])
def test_a_file_that_is_no_json_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "x.json").write_bytes(content)
    with pytest.raises(typer.BadParameter, match="--edit"):
        parse_edits([f"@{tmp_path / 'x.json'}"])


def test_an_array_is_no_list_of_edits(tmp_path: Path) -> None:
    np.save(tmp_path / "d.npy", np.ones(3))
    with pytest.raises(typer.BadParameter, match="it is not JSON"):
        parse_edits([f"@{tmp_path / 'd.npy'}"])


def test_a_pickled_array_is_never_read(tmp_path: Path) -> None:
    evil: Any = np.array([{}])
    np.save(tmp_path / "x.npy", evil, allow_pickle=True)
    with pytest.raises(typer.BadParameter, match=r"not a readable \.npy file"):
        parse_edits([f"a add @{tmp_path / 'x.npy'}"])
