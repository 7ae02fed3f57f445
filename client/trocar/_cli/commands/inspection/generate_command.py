"""`trocar generate`: text that follows a prompt, with values and edits at every token."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar import Client
from trocar._base.tables import size_text
from trocar._cli.console import show_json
from trocar._cli.options.arguments import AsJson, ModelId, check_file
from trocar._cli.options.completion import complete_modules
from trocar._cli.options.edit_options import EditTexts, parse_edits
from trocar._cli.options.execution_options import AdapterOption
from trocar._request.taps import lens
from trocar._request.texts import chat, texts
from trocar._result.generated import GeneratedSequence
from trocar._result.likely_tokens import LENS
from trocar._sync.generation import Generation

_SUFFIX = ".safetensors"


def generate(  # noqa: PLR0913 - options of a command
    client: Client,
    model_id: ModelId,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue.")],
    *,
    as_chat: Annotated[
        bool, typer.Option("--chat", help="The prompt is a message of a user, for the model's chat template.")
    ] = False,
    max_new_tokens: Annotated[
        int, typer.Option(metavar="COUNT", min=1, help="The most tokens that are generated.")
    ] = 64,
    temperature: Annotated[
        float, typer.Option(metavar="NUMBER", min=0, max=100, help="0 takes the most likely token each time.")
    ] = 0.0,
    top_k: Annotated[
        int | None, typer.Option(metavar="COUNT", min=1, help="Draw from so many tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", min=0, max=1, help="Draw from tokens of this probability together."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="NUMBER", min=0, help="Of the drawn tokens.")] = 0,
    n: Annotated[
        int, typer.Option("--n", metavar="COUNT", min=1, help="Samples of the prompt, one below another.")
    ] = 1,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="A text that ends the output; repeat for more.")
    ] = None,
    ignore_end: Annotated[
        bool, typer.Option("--ignore-end", help="Let no token end the text, not even the model's own.")
    ] = False,
    value: Annotated[
        list[str] | None,
        typer.Option(
            "--tap",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector of a value to collect at every token; repeat for more.",
        ),
    ] = None,
    layer: Annotated[
        list[str] | None,
        typer.Option(
            "--lens",
            metavar="SELECTOR",
            autocompletion=complete_modules,
            help="Selector of a layer: what it would say at every token; repeat for more.",
        ),
    ] = None,
    edit: EditTexts = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Save the values to a .safetensors file."),
    ] = None,
    adapter: AdapterOption = "",
    as_json: AsJson = False,
) -> None:
    """Print the text that follows a prompt, as it is generated."""
    if out is not None:
        check_file(out, _SUFFIX)
        if n != 1:
            raise typer.BadParameter("the values of one text are saved; leave --n out", param_hint="--out")
    run = client.generate(
        model_id,
        chat([("user", prompt)], add_generation_prompt=True) if as_chat else texts(prompt),
        max_new_tokens=max_new_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        n=n,
        stop=stop or (),
        stop_token_ids=[] if ignore_end else None,
        taps=[*(value or ()), *map(lens, layer or ())],
        edits=parse_edits(edit),
        adapter=adapter,
    )
    if not as_json:
        _show(run, n)
    if out is not None:
        run.save(out)
    if as_json:
        reports = [_report(sequence, out) for sequence in run.sequences]
        show_json(reports[0] if n == 1 else {"sequences": reports})
        return
    for sequence in run.sequences:
        _report_values(sequence, edit or ())
    if out is not None:
        typer.echo(f"wrote {out} ({size_text(out.stat().st_size)})", err=True)


def _show(run: Generation, n: int) -> None:
    """Print the text as it comes; several below each other at the end, each below the index of its sample."""
    if n > 1:
        for sequence in run.sequences:
            typer.echo(f"--- sample {sequence.sample}\n{sequence.text}")
        return
    shown = ""
    for token in run:
        shown += token.text
        typer.echo(token.text, nl=False)
    typer.echo(run.text[len(shown) :])


def _report_values(sequence: GeneratedSequence, edits: Sequence[str]) -> None:
    """Print the shapes of values, what lenses read at the last position, and the counts of edits."""
    for name in sequence.values:
        typer.echo(f"{name}: {sequence[name].shape}", err=True)
    for name in (each for each in sequence.values if each.endswith(LENS)):
        likely = ", ".join(repr(token.text) for token in sequence.lens(name)[-1])
        typer.echo(f"{name.removesuffix(LENS)} would say behind the last token read: {likely}", err=True)
    for text, count in zip(edits, sequence.edit_counts, strict=False):
        gated = f", {count.gated_out} gated out" if count.gated_out else ""
        typer.echo(f"{text}: at {count.prompt} + {count.generated} positions{gated}", err=True)


def _report(sequence: GeneratedSequence, out: Path | None) -> dict[str, Any]:
    return {
        "text": sequence.text,
        "prompt_ids": sequence.prompt_ids,
        "token_ids": sequence.token_ids,
        "logprobs": sequence.logprobs,
        "finish_reason": sequence.finish_reason,
        "edit_counts": [asdict(count) for count in sequence.edit_counts],
        "shapes": {name: sequence[name].shape for name in sequence.values},
        "out": None if out is None else str(out),
    }
