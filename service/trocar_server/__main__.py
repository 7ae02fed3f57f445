"""Commands that the `trocar` CLI finds through the entry-point group `trocar.commands`."""

import asyncio
import gc
from pathlib import Path
from typing import Annotated, Any

import typer

from trocar_server.app.log_format import LogFormat, set_up_logging
from trocar_server.app.quick_imports import without_dynamo
from trocar_server.engine.schedule.allocator import keep_freed_memory, use_huge_pages
from trocar_server.errors import ServiceError


def serve(  # noqa: PLR0913, PLR0917 - options of a command
    models: Annotated[
        list[str] | None,
        typer.Argument(help="torchvision names, each with optional weights: resnet50, vit_b_16=random:0"),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file; see docs/serving.md")] = None,
    host: Annotated[
        str | None, typer.Option(help="address to listen on, or unix:/path [default: 127.0.0.1]")
    ] = None,
    port: Annotated[int | None, typer.Option(help="TCP port, 0 for a free one [default: 50051]")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda:0 [default: auto]")] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            help="data directory: weights, trainers, stored edits and tokens [default: ~/.cache/trocar]"
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="allow any address, without authentication"),
    ] = None,
    tokens: Annotated[
        bool | None, typer.Option("--tokens", help="every call needs a token of `trocar token create`")
    ] = None,
    tls_cert: Annotated[Path | None, typer.Option(help="the server's certificate chain, a PEM file")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="its private key, a PEM file")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="CA certificates, a PEM file; clients must then present a certificate")
    ] = None,
    reflection: Annotated[bool | None, typer.Option("--reflection", help="offer gRPC reflection")] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="TCP port of Prometheus metrics, 0 for a free one [default: none]")
    ] = None,
    page: Annotated[
        bool | None, typer.Option("--page", help="serve a web page as well; needs the extra 'page'")
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(help="TCP port of the page, 0 for a free one; implies --page [default: 8080]"),
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="format of log lines [default: text]")] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="exit with 1 if any model cannot be loaded")
    ] = None,
    ready_file: Annotated[
        Path | None, typer.Option(help="write the server's address to this file when it is ready")
    ] = None,
) -> None:
    """Host models and serve clients until stopped."""
    gc.disable()  # until `app.serve`: what is imported stays, and looking for garbage in it takes 0.5 s
    keep_freed_memory()
    use_huge_pages()
    # torch is imported here, after the allocator is set.
    with without_dynamo():
        from trocar_server.app import app
    from trocar_server.config import ModelConfig, ServerConfig, read_config
    from trocar_server.models import parse_model_argument

    def announce(running: app.App) -> None:
        address = running.rpc.address
        typer.echo(f"trocar is ready on {address} ({running.engine.owner.device})")
        for entry in running.engine.catalogue.entries():
            if entry.error_message:
                typer.echo(f"model {entry.spec.model_id} failed: {entry.error_message}", err=True)
        if running.telemetry.metrics_port is not None:
            typer.echo(f"metrics are on {settings.metrics_host}:{running.telemetry.metrics_port}")
        if running.page is not None:
            typer.echo(f"the page is on {running.page.url}")
        if ready_file:
            temporary = ready_file.with_suffix(".part")
            temporary.write_text(address)
            temporary.replace(ready_file)

    flags: dict[str, Any] = {"host": host, "port": port, "device": device, "insecure": insecure}
    flags |= {"reflection": reflection, "tokens": tokens, "metrics_port": metrics_port}
    flags |= {"tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    flags |= {"data_dir": data_dir, "strict": strict}
    flags |= {"log_format": log_format and log_format.value}
    overrides = {key: value for key, value in flags.items() if value is not None}
    if page or page_port is not None:
        overrides["page"] = {"enabled": True} | ({} if page_port is None else {"port": page_port})

    def read() -> ServerConfig:
        settings = read_config(config, **overrides)
        named = {
            spec.model_id: ModelConfig(
                source=spec.source, architecture=spec.named_architecture, weights=spec.weights
            )
            for spec in map(parse_model_argument, models or ())
        }
        return settings.model_copy(update={"models": {**settings.models, **named}})

    try:
        settings = read()
        set_up_logging(settings.log_format)
        asyncio.run(app.serve(settings, announce, read))
    except ServiceError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from None


def convert(
    source: Annotated[Path, typer.Argument(help="a .pth or .pt file with a state dict", exists=True)],
    target: Annotated[Path, typer.Argument(help="the .safetensors file to write")],
) -> None:
    """Convert a PyTorch state dict to safetensors, without running code in it."""
    from trocar_server.models import convert_checkpoint

    try:
        count = convert_checkpoint(source, target)
    except ServiceError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {count} tensors to {target}")


if __name__ == "__main__":
    typer.run(serve)
