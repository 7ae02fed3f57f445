"""Commands that the `trocar` CLI finds through the entry-point group `trocar.commands`."""

import asyncio
import gc
import logging
import sys
from pathlib import Path
from typing import Annotated, Any

import structlog
import typer

from trocar_server.engine.allocator import keep_freed_memory
from trocar_server.errors import ServiceError
from trocar_server.quick_imports import without_dynamo


def serve(  # noqa: PLR0913, PLR0917 - a command line
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
        Path | None, typer.Option(help="who signs client certificates; every client must have one then")
    ] = None,
    reflection: Annotated[bool | None, typer.Option("--reflection", help="offer gRPC reflection")] = None,
    ready_file: Annotated[Path | None, typer.Option(help="write the address here when ready")] = None,
) -> None:
    """Host models and answer clients until stopped."""
    gc.disable()  # until `app.serve`: what is imported stays, and looking for garbage in it takes 0.5 s
    _set_up_logging()
    keep_freed_memory()
    # torch is imported here, after the allocator is set.
    with without_dynamo():
        from trocar_server import app
    from trocar_server.config import ModelConfig, ServerConfig, read_config
    from trocar_server.models import parse_model_argument

    def announce(running: app.App) -> None:
        address = running.rpc.address
        typer.echo(f"trocar is ready on {address} ({running.engine.owner.device})")
        if ready_file:
            temporary = ready_file.with_suffix(".part")
            temporary.write_text(address)
            temporary.replace(ready_file)

    flags: dict[str, Any] = {
        "host": host,
        "port": port,
        "device": device,
        "insecure": insecure,
        "reflection": reflection,
    }
    flags |= {"tokens": tokens, "tls_cert": tls_cert, "tls_key": tls_key, "tls_client_ca": tls_client_ca}
    overrides = {key: value for key, value in flags.items() if value is not None}

    def read() -> ServerConfig:
        settings = read_config(config, **overrides)
        named = {
            spec.model_id: ModelConfig(weights=spec.weights)
            for spec in map(parse_model_argument, models or ())
        }
        return settings.model_copy(update={"models": {**settings.models, **named}})

    try:
        asyncio.run(app.serve(read(), announce, read))
    except ServiceError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from None


def convert(
    source: Annotated[Path, typer.Argument(help="a .pth or .pt file with a state dict", exists=True)],
    target: Annotated[Path, typer.Argument(help="the .safetensors file to write")],
) -> None:
    """Turn a PyTorch state dict into safetensors, without running any code that it may hold."""
    from trocar_server.models import convert_checkpoint

    try:
        count = convert_checkpoint(source, target)
    except ServiceError as error:
        typer.echo(f"error: {error.message}", err=True)
        raise typer.Exit(1) from None
    typer.echo(f"wrote {count} tensors to {target}")


def _set_up_logging() -> None:
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            structlog.dev.ConsoleRenderer() if sys.stderr.isatty() else structlog.processors.LogfmtRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        cache_logger_on_first_use=True,
    )


if __name__ == "__main__":
    typer.run(serve)
