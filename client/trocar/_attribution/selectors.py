"""The selector of a value's gradient."""

import re

INPUT = "/in"
OUTPUT = "/out"

_PICKS = r'(?:\[(?:-?\d+|"(?:[^"\\]|\\.)*")\])*'
_PARTS = re.compile(rf"(?P<path>.*?)(?:/(?P<port>out|in(?:\(.+\))?))?(?P<picks>{_PICKS})", re.DOTALL)


def gradient_of(selector: str) -> str:
    """Return the selector of the gradient with respect to what a selector stands for.

    gradient_of("layer4")                # 'layer4/grad_out'
    gradient_of("fc/in[0]")              # 'fc/grad_in[0]'
    """
    parts = _PARTS.fullmatch(selector)
    assert parts is not None  # any text matches
    return f"{parts['path']}/grad_{parts['port'] or 'out'}{parts['picks']}"
