"""Why a model rejects its inputs, in the words of its caller; torch's own are about operators.

rejection("mat1 and mat2 shapes cannot be multiplied (2x64 and 32x5)")
# "rows of 64 numbers, and the layer takes 32"
"""

import re
from collections.abc import Callable

_WORDS: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = tuple(
    (re.compile(pattern, re.IGNORECASE | re.DOTALL), words)
    for pattern, words in (
        (
            r"Expected (\d)D \(unbatched\) or (\d)D \(batched\) input to \w+, "
            r"but got input of size: (\[[^\]]*\])",
            lambda m: f"an array of {_rank(m[3])} dimensions, and the layer takes {m[2]}",
        ),
        (
            r"expected (\d)D(?: or (\d)D)? input \(got (\d)D input\)",
            lambda m: f"an array of {m[3]} dimensions, and the layer takes {m[2] or m[1]}",
        ),
        (
            r"to have (\d+) channels, but got (\d+) channels",
            lambda m: f"{m[2]} channels, and the layer takes {m[1]}",
        ),
        (r"Invalid channel dimensions", lambda _: "another number of channels than the layer takes"),
        (
            r"shapes cannot be multiplied \(\d+x(\d+) and (\d+)x\d+\)",
            lambda m: f"rows of {m[1]} numbers, and the layer takes {m[2]}",
        ),
        (
            r"The size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)",
            lambda m: f"sizes that do not fit together: {m[1]} and {m[2]}",
        ),
        (
            r"Given normalized_shape=\[(\d+)\], expected input with shape \[[*, \d]*\], but got input of "
            r"size[^\[]*\[(?:\d+, )*(\d+)\]",
            lambda m: f"rows of {m[2]} numbers, and the layer takes {m[1]}",
        ),
        (
            r"input\.size\(-1\) must be equal to input_size\. Expected (\d+), got (\d+)"
            r"|expecting embedding dimension of (\d+), but got (\d+)",
            lambda m: f"rows of {m[2] or m[4]} numbers, and the layer takes {m[1] or m[3]}",
        ),
        (
            r"Expected input to be (\d)D(?: or (\d)D)?, got (\d)D instead",
            lambda m: f"an array of {m[3]} dimensions, and the layer takes {m[2] or m[1]}",
        ),
        (
            r"running_mean should contain (\d+) elements not (\d+)",
            lambda m: f"{m[1]} channels, and the layer takes {m[2]}",
        ),
        (
            r"Expected more than 1 value per channel when training",
            lambda _: (
                "a single value for each channel, of which batch normalisation has no variance: train on at "
                "least two samples"
            ),
        ),
        (
            r"Expected more than 1 spatial element when training",
            lambda _: "a single position for each channel, of which the normalisation has no variance",
        ),
        (
            r"padded input size per channel: \(([\d x]+)\)\. Kernel size: \(([\d x]+)\)\. Kernel size can't",
            lambda m: f"{m[1]} positions with padding, fewer than the {m[2]} of the layer's kernel",
        ),
        (
            r"Given input size: \(([\dx]+)\)\. Calculated output size: \([\dx]+\)\. Output size is too small",
            lambda m: f"values of {m[1]}, too small for the layer's windows",
        ),
        (
            r"Padding size should be less than the corresponding input dimension",
            lambda _: "fewer positions than the layer adds by reflection",
        ),
        (
            r"have the same dtype, but got (\w+) and (\w+)|Input type \((\w+)\) and (?:bias|weight) type "
            r"\((\w+)\) should be the same|expected scalar type (\w+) but found (\w+)",
            lambda m: (
                f"values of {_dtype(m[1] or m[3] or m[6])}, and the layer takes "
                f"{_dtype(m[2] or m[4] or m[5])}"
            ),
        ),
        (
            r"'indices' to have one of the following scalar types: Long, Int; but got torch\.(\w+)",
            lambda m: (
                f"values of {_dtype(m[1].removesuffix('Tensor'))}, and the layer's table takes int64 or int32"
            ),
        ),
        (
            r"Sizes of tensors must match except in dimension (\d+)\. Expected (?:size )?(\d+)"
            r"(?: in dimension \d+)? but got (?:size )?(\d+)",
            lambda m: f"sizes that do not fit together beside dimension {m[1]}: {m[2]} and {m[3]}",
        ),
        (
            r"Expected size for first two dimensions of batch2 tensor to be: \[\d+, (\d+)\] "
            r"but got: \[\d+, (\d+)\]",
            lambda m: f"rows of {m[1]} numbers, multiplied by {m[2]}",
        ),
        (
            r"shape '(\[[-\d, ]*\])' is invalid for input of size (\d+)",
            lambda m: f"{int(m[2]):,} numbers, which the model cannot arrange as {m[1]}",
        ),
        (
            r"Provided sizes (\[[-\d, ]*\]) don't multiply up to the size of dim \d+ \((\d+)\)",
            lambda m: f"a dimension of {int(m[2]):,}, which the model cannot arrange as {m[1]}",
        ),
        (r"index out of range in self", lambda _: "a number that is outside of the model's table"),
    )
)


def rejection(text: str) -> str:
    """Return why inputs do not fit, from torch's text; that text itself where it is not known."""
    for pattern, words in _WORDS:
        match = pattern.search(text)
        if match is not None:
            return words(match)
    return text


_DTYPES = {
    "double": "float64",
    "float": "float32",
    "half": "float16",
    "long": "int64",
    "int": "int32",
    "short": "int16",
    "char": "int8",
    "byte": "uint8",
}
"""Names of dtypes, by torch's older ones."""


def _dtype(name: str) -> str:
    return _DTYPES.get(name.lower(), name.lower())


def _rank(size: str) -> int:
    return len([part for part in size.strip("[]").split(",") if part.strip()])
