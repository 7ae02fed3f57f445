"""Generated texts as a notebook shows them: escaped, every space seen, coloured by what was asked for."""

import math
import re
from html import unescape
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trocar._result.generated import GeneratedSequence, GeneratedToken, SequenceParts
from trocar._result.generated_view import MOST_SEQUENCES, sequences_view
from trocar._result.likely_tokens import LikelyToken
from trocar._result.token_view import MOST_PIECES, Scale, scale_of, visible

EVIL = "\"'><script>alert('x')</script><img src=x onerror=alert(1)>&amp;"
STYLE = re.compile(
    r"(white-space:pre-wrap;overflow-wrap:anywhere;font-family:monospace;line-height:1\.7;text-align:left"
    r"|vertical-align:top;text-align:left;width:50%"
    r"|(opacity:0\.65;?)?(background-color:rgba\(\d+,\d+,\d+,0?\.\d+\);border-radius:3px)?)"
)


class Reader(HTMLParser):
    """Reads a view; `tokens` are title, style and text of each."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.styles: list[str] = []
        self.text = ""
        self.tokens: list[list[str]] = []
        self.feed(html)
        self.close()
        assert not self.open
        assert all(STYLE.fullmatch(style) for style in self.styles)
        assert self.tags <= {"div", "span", "small", "b", "table", "tr", "td"}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {key: value or "" for key, value in attrs}
        assert set(given) <= {"title", "style"}
        self.open.append(tag)
        self.tags.add(tag)
        self.styles += [given["style"]] if "style" in given else []
        if tag == "span":
            self.tokens.append([given.get("title", ""), given.get("style", ""), ""])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data
        if self.open[-1] == "span":
            self.tokens[-1][2] += data

    def opacities(self) -> list[float]:
        found = [re.search(r",([\d.]+)\)", style) for _, style, _ in self.tokens]
        return [float(each[1]) if each else 0.0 for each in found]


def parts(**given: Any) -> SequenceParts:
    usual: dict[str, Any] = {
        "prompt": 0,
        "sample": 0,
        "prompt_ids": (7, 8),
        "expansions": {},
        "prompt_texts": ("a", " b"),
        "tokens": [
            GeneratedToken(2, 11, " c", -0.5, (LikelyToken(11, " c", -0.5), LikelyToken(5, " x", -1.5))),
            GeneratedToken(3, 12, " d", -4.0),
        ],
        "reason": "length",
    }
    return SequenceParts(**{**usual, **given})


def sequence(**given: Any) -> GeneratedSequence:
    return GeneratedSequence(parts(**given))


def lens(name: str = "layer.1:lens") -> dict[str, Any]:
    """What a lens with two tokens read at positions 0 to 2."""
    logprobs = np.array([[-0.2, -2.0], [-0.25, -3.0], [-0.5, -1.0]], np.float32)
    ids = np.array([[8, 9], [5, 11], [1, 2]])
    return {
        "rows": {name: [logprobs], f"{name}.indices": [ids]},
        "positions": {name: [0, 1, 2], f"{name}.indices": [0, 1, 2]},
        "token_texts": {8: " b", 9: EVIL, 5: " x", 11: " c", 1: "q", 2: "r"},
    }


def shown(view: Any) -> Reader:
    return Reader(view._repr_html_())


def test_the_prompt_comes_before_the_generated_tokens() -> None:
    reader = shown(sequence())
    assert [text for _, _, text in reader.tokens] == ["a", " b", " c", " d"]
    assert reader.text.startswith("a b│ c d")
    assert reader.tokens[2][0] == (
        "position 2, token 11\nlog-probability -0.5 (60.65%)\nlikely: ' c' -0.5, ' x' -1.5"
    )
    assert reader.tokens[0][0] == "position 0, token 7"


def test_less_likely_tokens_are_darker() -> None:
    reader = shown(sequence())
    assert reader.opacities() == [0.0, 0.0, 0.08, 0.6]
    assert "darker: less likely" in reader.text
    assert shown(sequence().show(None)).opacities() == [0.0] * 4


def test_hostile_tokens_are_text() -> None:
    token = GeneratedToken(2, 11, EVIL, -1.0, (LikelyToken(1, EVIL, -2.0),))
    one = sequence(tokens=[token], prompt_texts=(EVIL, EVIL), held_text=EVIL)
    html = one._repr_html_()
    assert "<script" not in html
    assert "<img" not in html
    assert shown(one).text.count(EVIL) == 4
    assert repr(EVIL) in shown(one).tokens[2][0]


@given(st.text(max_size=30))
def test_any_text_is_shown_as_text(text: str) -> None:
    token = GeneratedToken(2, 11, text, -1.0, (LikelyToken(1, text, -2.0),))
    reader = shown(sequence(tokens=[token], prompt_texts=(text, text), held_text=text))
    assert [one for _, _, one in reader.tokens][2] == (visible(text) if text else "#11")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (" the", " the"),
        ("  ", "␣␣"),
        ("a\nb", "a⏎\nb"),
        ("\t", "⇥\t"),
        ("\u202eabc", "\\u202eabc"),
        ("\u200b", "\\u200b"),
        ("a\xa0b", "a\\xa0b"),
        ("\x00\x1b[31m", "\\x00\\x1b[31m"),
        ("日本語 🙂", "日本語 🙂"),
    ],
)
def test_spaces_and_control_characters_are_seen(text: str, expected: str) -> None:
    assert visible(text) == expected


def test_a_token_without_text_shows_its_id() -> None:
    reader = shown(sequence(prompt_texts=(), tokens=[GeneratedToken(2, 11, "", -1.0)]))
    assert [text for _, _, text in reader.tokens] == ["#7", "#8", "#11"]


def test_a_token_that_ends_the_text_shows_its_own_text() -> None:
    likely = (LikelyToken(11, "</s>", -1.0),)
    assert shown(sequence(tokens=[GeneratedToken(2, 11, "", -1.0, likely)])).tokens[2][2] == "</s>"
    part = (LikelyToken(11, "\ufffd", -1.0),)
    assert shown(sequence(tokens=[GeneratedToken(2, 11, "", -1.0, part)])).tokens[2][2] == "#11"


def test_text_that_was_held_back_comes_last() -> None:
    assert "a b│ c d<end" in shown(sequence(held_text="<end")).text


@pytest.mark.parametrize("name", ["layer.1", "layer.1:lens"])
def test_a_lens_colours_the_token_that_it_foretells(name: str) -> None:
    reader = shown(sequence(**lens()).show(f"lens:{name}"))
    # position 0 foretells ' b', 1 ' c'; at 2 the token 12 is not among the two, the last of which has -1
    assert reader.opacities() == [0.0, 0.03, 0.45, 0.15]
    assert f"lens {name}: ' b' -0.2" in reader.tokens[1][0]
    assert "not among the 2 most likely" in reader.tokens[3][0]


def test_one_number_for_each_position_colours_it() -> None:
    one = sequence()
    assert shown(one.show([0.0, 1.0, 2.0, 4.0])).opacities() == [0.0, 0.19, 0.38, 0.75]
    assert shown(one.show(np.array([2.0, 4.0, 6.0]))).opacities() == [0.0, 0.38, 0.75, 0.0]
    reader = shown(one.show(np.array([-2.0, 1.0]), positions=(1, 3)))
    assert reader.opacities() == [0.0, 0.75, 0.0, 0.38]
    assert "40,120,220" in reader.tokens[1][1]
    assert "230,130,30" in reader.tokens[3][1]
    assert "value -2" in reader.tokens[1][0]
    assert "blue: below it" in reader.text


def test_numbers_that_are_not_finite_break_nothing() -> None:
    reader = shown(sequence().show([math.nan, -math.inf, 1.0, math.inf]))
    assert reader.opacities()[0] == 0.0
    assert shown(sequence().show([math.nan] * 4)).text.endswith("no number is finite")
    assert scale_of(np.array([3.0, 3.0])).style(3.0)


def test_a_scale_reaches_its_ends() -> None:
    assert Scale(0.0, 2.0, "").style(0.0) == ""
    assert Scale(0.0, 2.0, "").style(9.0) == Scale(0.0, 2.0, "").style(2.0)


@pytest.mark.parametrize(
    ("by", "positions", "problem"),
    [
        ("norm", None, "colour_by='norm' is not"),
        ("logprob", (1,), "belong to an array"),
        ([1.0, 2.0], None, r"shape \(2,\); the text has 4 tokens"),
        (np.ones((4, 3)), None, r"shape \(4, 3\)"),
        ([1.0, 2.0], (1,), "for 1 positions"),
        ([1.0], (4,), "positions 4: the text has 4 tokens"),
        ([1.0], (-1,), "counted from 0"),
    ],
)
def test_what_cannot_colour_is_refused(by: Any, positions: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        sequence().show(by, positions=positions)
    with pytest.raises(KeyError, match="no lens"):
        sequence().show("lens:layer.9")


def test_an_unfinished_text_says_so() -> None:
    assert "so far" in shown(sequence(reason=None)).text
    assert "so far" not in shown(sequence()).text
    assert shown(sequence(reason=None, tokens=[])).text.startswith("so far")


def test_several_texts_have_titles_and_are_counted() -> None:
    several = [sequence(prompt=place) for place in range(MOST_SEQUENCES + 3)]
    text = shown(sequences_view(several, None, "logprob")).text
    assert "prompt 15, sample 0" in text
    assert "prompt 16, sample 0" not in text
    assert f"the first {MOST_SEQUENCES} of 19 texts" in text
    with pytest.raises(ValueError, match=r"run\.sequences\[i\]"):
        sequences_view(several, None, [1.0] * 4)


def test_the_baseline_is_beside_it() -> None:
    steered, plain = sequence(), sequence(tokens=[GeneratedToken(2, 9, " plain", -0.1)])
    reader = shown(sequences_view([steered], [plain], "logprob"))
    assert {"table", "td"} <= reader.tags
    assert reader.text.index("with edits") < reader.text.index("without edits") < reader.text.index(" plain")
    assert shown(sequences_view([steered], [plain], [1.0, 2.0, 3.0, 4.0])).opacities()[4:] == [0.0] * 3


def test_a_very_long_text_shows_its_end() -> None:
    count = MOST_PIECES + 500
    one = sequence(prompt_ids=(1,) * count, prompt_texts=("w",) * count)
    reader = shown(one)
    assert len(reader.tokens) == MOST_PIECES
    assert reader.text.startswith("… 502 tokens before ")
    assert reader.tokens[-1][2] == " d"


def test_the_text_of_a_view_is_that_of_the_texts() -> None:
    one = sequence()
    assert str(one) == str(one.show()) == one.text == " c d"
    assert repr(one.show()) == "<TokenView of 4 tokens>"
    assert str(sequences_view([one, sequence(sample=1)], None, None)) == (
        "--- prompt 0, sample 0\n c d\n--- prompt 0, sample 1\n c d"
    )
    assert unescape(one._repr_html_()).count("<span") == 4
