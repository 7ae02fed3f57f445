"""Tables as files: the option, and its check before anything is computed."""

from pathlib import Path
from typing import Annotated

import typer

from trocar._cli.failures import USAGE, fail, refuse
from trocar._result.plain_table import check_table_path
from trocar.errors import MissingExtraError

TableFile = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", dir_okay=False, help="Also save the rows, as .csv or .parquet."),
]


def check_table(path: Path | None) -> None:
    """Check that a table can be written.

    Raises:
        typer.BadParameter: The file's name has another suffix, or the folder does not exist.
        typer.Exit: pyarrow is missing.
    """
    if path is None:
        return
    try:
        check_table_path(path)
    except ValueError as error:
        refuse(f"--out: {error}")
    except MissingExtraError as error:
        fail(str(error), USAGE)
    if not path.absolute().parent.is_dir():
        refuse(f"--out: no folder {path.parent}")
