"""Options that take several values at once, as shells expand them."""

import pytest

from trocar._cli.options.many_values import MANY, spread


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("m d --trainable a b --epochs 2", "m d --trainable a --trainable b --epochs 2"),
        ("m d --trainable a --trainable b c", "m d --trainable a --trainable b --trainable c"),
        ("m d --trainable=a b", "m d --trainable=a --trainable b"),
        (
            "m d --metric f1 accuracy --augment A B",
            "m d --metric f1 --metric accuracy --augment A --augment B",
        ),
        ("m d --clamp fc.*=-0.1:0.1 -x=1:2", "m d --clamp fc.*=-0.1:0.1 --clamp -x=1:2"),
        ("--trainable a b -- m d", "--trainable a --trainable b -- m d"),
        ("m d --keep --eval e --bf16", "m d --keep --eval e --bf16"),
        ("m d --trainable", "m d --trainable"),
        ("", ""),
    ],
)
def test_an_option_is_repeated_before_each_of_its_values(given: str, expected: str) -> None:
    assert spread(given.split(), MANY) == expected.split()


def test_values_are_left_as_they_are() -> None:
    assert spread(["--trainable", "", "a b"], MANY) == ["--trainable", "", "--trainable", "a b"]
