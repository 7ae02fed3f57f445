"""Commands that the `trocar` CLI finds through the entry-point group `trocar.commands`.

They raise `ServiceError` when they fail; the CLI prints it, as text or JSON, and exits with 1.
"""

import asyncio
import gc
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trocar_api.reasons import ErrorReason
from trocar_server import __version__
from trocar_server.app.log_format import LogFormat, early_log, set_up_logging
from trocar_server.app.quick_imports import without_dynamo
from trocar_server.engine.schedule.allocator import keep_freed_memory, use_huge_pages
from trocar_server.errors import ServiceError
from trocar_server.storage.durable import write_durably

if TYPE_CHECKING:
    from trocar_server.app.app import App
    from trocar_server.config import ServerConfig


def serve(  # noqa: PLR0913, PLR0917 - options of a command
    models: Annotated[
        list[str] | None,
        typer.Argument(metavar="MODEL", help="Models: resnet50, vit_b_16=random:0, timm:NAME, ID=hf:FOLDER."),
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="TOML file with models and settings; see docs/serving.md."),
    ] = None,
    host: Annotated[
        str | None,
        typer.Option(metavar="HOST", help="Address to listen on, or unix:/path. Default: 127.0.0.1."),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="TCP port, 0 for a free one. Default: 50051.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEVICE", help="auto, cpu or cuda:0. Default: auto.")
    ] = None,
    data_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Data directory: weights, trainers, stored edits and tokens. Default: "
            "~/.local/state/trocar.",
        ),
    ] = None,
    insecure: Annotated[
        bool | None,
        typer.Option("--insecure", help="Allow any address, without authentication or TLS."),
    ] = None,
    tokens: Annotated[
        bool | None,
        typer.Option("--tokens", help="Require a token of `trocar admin token create` for every call."),
    ] = None,
    tls_cert: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The server's certificate chain, a PEM file.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(metavar="FILE", help="Its private key, a PEM file.")] = None,
    tls_client_ca: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="CA certificates, a PEM file; clients must then present a certificate."
        ),
    ] = None,
    reflection: Annotated[bool | None, typer.Option("--reflection", help="Offer gRPC reflection.")] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="TCP port of Prometheus metrics, 0 for a free one. Default: no metrics."
        ),
    ] = None,
    page: Annotated[
        bool | None, typer.Option("--page", help="Serve a web page as well; needs the extra 'page'.")
    ] = None,
    page_port: Annotated[
        int | None,
        typer.Option(
            metavar="NUMBER", help="TCP port of the page, 0 for a free one; implies --page. Default: 8080."
        ),
    ] = None,
    log_format: Annotated[LogFormat | None, typer.Option(help="Format of log lines. Default: text.")] = None,
    strict: Annotated[
        bool | None, typer.Option("--strict", help="Exit with 1 if any model cannot be loaded.")
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the server's address to this file when it is ready."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the address, or why the server cannot start, as JSON.")
    ] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Deploy on a Ray cluster: its address, auto, or local to start one for as long.",
        ),
    ] = None,
) -> None:
    """Host models and serve clients until stopped."""
    gc.disable()  # until `app.serve`: what is imported stays, and looking for garbage in it takes 0.5 s
    keep_freed_memory()
    use_huge_pages()
    from trocar_server.config import ModelConfig, ServerConfig, read_config

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
        if not models:
            return settings
        # torch is imported here, after the allocator is set.
        with without_dynamo():
            from trocar_server.models import parse_model_arguments
        named = {
            model_id: ModelConfig(
                source=spec.source, architecture=spec.named_architecture, weights=spec.weights
            )
            for model_id, spec in parse_model_arguments(models).items()
        }
        return settings.model_copy(update={"models": {**settings.models, **named}})

    _say_start(config, models or (), read_config(config, **overrides))
    settings = read()
    set_up_logging(settings.log_format)
    if ray:
        _deploy(ray, settings, ready_file, as_json=as_json)
    else:
        _serve(settings, read, ready_file, as_json=as_json)


def _say_start(config: Path | None, models: Sequence[str], settings: "ServerConfig") -> None:
    """Log what starts, before torch is imported and models are loaded, which takes seconds to minutes."""
    early_log(settings.log_format).info(
        "starting",
        version=__version__,
        config="none" if config is None else str(config),
        models=len({*settings.models, *models}),
        host=settings.host,
        port=settings.port,
    )


def _serve(
    settings: "ServerConfig", read: Callable[[], "ServerConfig"], ready_file: Path | None, *, as_json: bool
) -> None:
    """Serve from this process."""
    with without_dynamo():
        from trocar_server.app import app

    def announce(running: app.App) -> None:
        _announce(running, settings.metrics_host, as_json=as_json)
        _write_address(ready_file, running.rpc.address)

    asyncio.run(app.serve(settings, announce, read))


def _announce(running: "App", metrics_host: str, *, as_json: bool) -> None:
    """Print where the server listens, and which models failed."""
    address, device = running.rpc.address, str(running.engine.owner.device)
    entries = running.engine.catalogue.entries()
    failed = {entry.spec.model_id: entry.error_message for entry in entries if entry.error_message}
    port = running.telemetry.metrics_port
    metrics = None if port is None else f"{metrics_host}:{port}"
    page = None if running.page is None else running.page.url
    if as_json:
        ready: dict[str, Any] = {"address": address, "device": device, "metrics": metrics, "page": page}
        ready |= {"failed_models": failed}
        typer.echo(json.dumps(ready, ensure_ascii=False))
        return
    typer.echo(f"trocar is ready on {address} ({device})")
    for model_id, message in failed.items():
        typer.echo(f"model {model_id} failed: {message}", err=True)
    if metrics is not None:
        typer.echo(f"metrics are on {metrics}")
    if page is not None:
        typer.echo(f"the page is on {page}")


def _deploy(address: str, settings: "ServerConfig", ready_file: Path | None, *, as_json: bool) -> None:
    """Serve from a Ray cluster."""
    from trocar_server.cluster.commands import serve_on_ray

    def announce(gateways: list[str], ray_address: str) -> None:
        if as_json:
            typer.echo(json.dumps({"address": gateways[0], "gateways": gateways, "ray": ray_address}))
        else:
            where = f"{len(settings.models)} models on Ray at {ray_address}"
            typer.echo(f"trocar is ready on {', '.join(gateways)} ({where})")
        _write_address(ready_file, gateways[0])

    gc.enable()
    serve_on_ray(address, settings, announce)


def _write_address(ready_file: Path | None, address: str) -> None:
    if ready_file is None:
        return
    try:
        write_durably(ready_file, address.encode(), is_private=False, is_durable=False)
    except OSError as error:
        raise ServiceError(
            ErrorReason.INVALID_ARGUMENT, f"cannot write the ready file '{ready_file}': {error.strerror}"
        ) from None


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A .pth or .pt file with a state dict.", exists=True)
    ],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="The .safetensors file to write.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, also for errors.")] = False,
) -> None:
    """Convert a PyTorch state dict to safetensors, without running code in it."""
    from trocar_server.models import convert_checkpoint

    count = convert_checkpoint(source, target)
    if as_json:
        typer.echo(json.dumps({"tensors": count, "target": str(target)}))
    else:
        typer.echo(f"wrote {count} tensors to {target}")


if __name__ == "__main__":
    try:
        typer.run(serve)
    except ServiceError as error:  # `trocar serve` shows it otherwise, also as JSON
        sys.exit(f"error: {error.message}")
