"""`trocar steer`: a text with and without a stored direction."""

from dataclasses import asdict
from typing import Annotated

import typer

from trocar import Client
from trocar._cli.console import show_json
from trocar._cli.failures import refuse
from trocar._cli.options.arguments import AsJson, ModelId
from trocar._cli.options.completion import complete_modules
from trocar._request.edits import edit
from trocar._request.texts import chat


def steer(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    *,
    name: Annotated[
        str, typer.Option("--with", metavar="NAME", help="A stored direction; see `trocar probe`.")
    ],
    at: Annotated[
        list[str],
        typer.Option(
            "--at",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Where it was fitted, for example layer[12]; repeat for more.",
        ),
    ],
    alpha: Annotated[
        float, typer.Option(metavar="NUMBER", help="How much of it is added; below 0 away from it.")
    ] = 1.0,
    units: Annotated[
        str,
        typer.Option(
            metavar="raw|norm", help="Of alpha: the vector as fitted, or mean norms of the value there."
        ),
    ] = "raw",
    project_out: Annotated[
        bool, typer.Option("--project-out", help="Remove the direction instead of adding it.")
    ] = False,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of a user, for the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", help="The most tokens that are generated.")
    ] = 64,
    as_json: AsJson = False,
) -> None:
    """Print the text that follows a prompt without and with a stored direction."""
    if units not in ("raw", "norm"):
        refuse(f"--units {units!r} is not raw or norm")
    if project_out:
        edits = [edit(place, "project_out", name) for place in at]
    else:
        edits = [edit(place, "steer", name, alpha=alpha, units=units) for place in at]
    given = chat([("user", prompt)], add_generation_prompt=True) if as_chat else prompt
    plain = client.generate(model_id, given, max_new_tokens=max_new_tokens).text
    steered = client.generate(model_id, given, max_new_tokens=max_new_tokens, edits=edits)
    if as_json:
        counts = [asdict(count) for count in steered.edit_counts]
        show_json({"plain": plain, "steered": steered.text, "edit_counts": counts})
        return
    typer.echo(f"--- without\n{plain}\n--- with {name}\n{steered.text}")
