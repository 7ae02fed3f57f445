"""Extras: libraries that only some commands and methods need, imported before anything is computed."""

from importlib import import_module

from trocar.errors import MissingExtraError

_LIBRARIES = {"PIL": "Pillow"}
"""What a module's library is called, where that is another name."""
HUGGINGFACE = "hf:"
"""How the name of a dataset of Hugging Face begins."""


def need(what: str, extra: str, *modules: str) -> None:
    """Import libraries, to check that they are installed.

    Args:
        what: The feature that needs them, for the message.
        extra: The extra that has them.
        modules: Their names.

    Raises:
        MissingExtraError: One is not installed, or does not work; says what to install.
    """
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:
            name = module.partition(".")[0]
            raise MissingExtraError(
                f'{what} needs {_LIBRARIES.get(name, name)}: pip install "trocar[{extra}]"'
            ) from error


def need_for_source(source: object) -> None:
    """Import the library of a source of samples, if its name has one.

    Raises:
        MissingExtraError: It is not installed.
    """
    if isinstance(source, str) and source.startswith(HUGGINGFACE):
        need(HUGGINGFACE, "huggingface", "datasets")
