"""Wrong command lines: own words, the nearest name, and the usage in one line."""

import json

import pytest

from trocar._cli import main
from trocar._cli.usage_errors import plain_metavar

EXTRACT = ("extract", "resnet18", "a.png", "--tap", "fc", "--out", "a.safetensors")
USAGE = (
    "usage: trocar extract [OPTIONS] MODEL [SOURCE]...",
    "all options: trocar extract --help",
)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    return shown.err.splitlines()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*EXTRACT, "--batch", "x"), "--batch must be a whole number, not 'x'"),
        ((*EXTRACT, "--batch", "1.5"), "--batch must be a whole number, not '1.5'"),
        ((*EXTRACT, "--batch", "0"), "--batch must be at least 1, not 0"),
        ((*EXTRACT, "--shard-size", "99999999999"), "--shard-size must be at most 100000, not 99999999999"),
        ((*EXTRACT, "--timeout", "soon"), "--timeout must be a number, not 'soon'"),
        (
            (*EXTRACT, "--numerics", "fst"),
            "--numerics must be one of exact, fast, bf16, not 'fst'; nearest: fast",
        ),
        (
            (*EXTRACT, "--format", "npz"),
            "--format must be one of safetensors, zarr, parquet, npy, not 'npz'; nearest: npy",
        ),
        ((*EXTRACT, "--ca", "nope.pem"), "--ca: file 'nope.pem' does not exist"),
        ((*EXTRACT, "--btch", "3"), "no option --btch; nearest: --batch"),
        (
            (*EXTRACT, "--reduce", "avg"),
            "no option --reduce: values are collected as they are; in Python, it is "
            "trocar.tap(..., reduce=trocar.pool('avg'))",
        ),
        ((*EXTRACT, "--layers", "fc"), "no option --layers: it is --tap SELECTOR, once for each"),
        ((*EXTRACT, "--timing=yes"), "--timing takes no value"),
        ((*EXTRACT, "--batch"), "--batch needs a value"),
        (("extract",), "MODEL is missing"),
        (("extract", "resnet18", "a.png", "--tap", "fc"), "--out PATH is missing"),
        (("extract", "resnet18", "a.png", "--out", "b"), "--tap SELECTOR is missing"),
    ],
)
def test_a_wrong_command_line_is_told_in_own_words(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    error, *usage = told(capsys, *words)
    assert error == f"error: {message}"
    assert set(usage) <= set(USAGE)


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (
            ("extrct",),
            [
                "error: no command 'extrct'; nearest: extract",
                "usage: trocar [OPTIONS] COMMAND [ARGS]...",
                "all options: trocar --help",
            ],
        ),
        (
            ("models", "a", "b"),
            [
                "error: too many arguments: b",
                "usage: trocar models [OPTIONS] [MODEL]",
                "all options: trocar models --help",
            ],
        ),
        (
            ("serve", "--port", "abc"),
            [
                "error: --port must be a whole number, not 'abc'",
                "usage: trocar serve [OPTIONS] [MODEL]...",
                "all options: trocar serve --help",
            ],
        ),
        (
            ("admin", "token", "create", "me", "--scope", "reed"),
            [
                "error: --scope must be one of read, run, train, admin, not 'reed'; nearest: read",
                "usage: trocar admin token create [OPTIONS] NAME",
                "all options: trocar admin token create --help",
            ],
        ),
    ],
)
def test_usage_is_one_line(
    words: tuple[str, ...], lines: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert told(capsys, *words) == lines


def test_a_group_alone_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    shown = told(capsys, "trainers")
    assert shown[0].startswith("Usage: trocar trainers")
    assert any(line.strip().startswith("watch") for line in shown)


def test_a_usage_error_is_json_where_results_are(capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = told(capsys, *EXTRACT, "--batch", "x", "--json")
    error = json.loads(line)["error"]
    assert error["message"] == "--batch must be a whole number, not 'x'"
    assert error["notes"] == list(USAGE)


@pytest.mark.parametrize(
    ("shown", "plain"),
    [
        ("{MODEL}", "MODEL"),
        ("{IMAGES}...", "IMAGES..."),
        ("[[IMAGES]...]...", "[IMAGES]..."),
        ("[SOURCE]...", "[SOURCE]..."),
        ("{SETTING=VALUE...}...", "SETTING=VALUE..."),
        ("<exact|fast>", "exact|fast"),
        ("<list[read|run]>", "read|run"),
        ("[OPTIONS]", "[OPTIONS]"),
    ],
)
def test_metavars_have_no_braces(shown: str, plain: str) -> None:
    assert plain_metavar(shown) == plain
