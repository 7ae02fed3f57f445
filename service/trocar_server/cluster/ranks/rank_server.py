"""Rank server: a worker of a data-parallel fit on a node that Ray chose, as a child process of an actor.

It builds the model of a replica from the same configuration, connects to that replica, and computes gradients
for it. It keeps nothing, and ends when the replica closes its channel, or when its own input ends.
"""

import os
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any

from trocar_server.app.log_format import set_up_logging
from trocar_server.app.quick_imports import without_dynamo
from trocar_server.cluster.lines import ParentLines
from trocar_server.config import ServerConfig
from trocar_server.engine.schedule.allocator import keep_freed_memory, use_huge_pages
from trocar_server.errors import ServiceError
from trocar_server.storage.temporary_folder import TemporaryFolder

if TYPE_CHECKING:
    from trocar_server.models import HostedModel


def main() -> None:
    """Read the settings, run shards until the fit has ended."""
    lines = ParentLines()
    settings = lines.read()
    if settings is None:
        return
    keep_freed_memory()
    use_huge_pages()
    config = ServerConfig(**settings["config"])
    set_up_logging(config.log_format)
    Thread(target=_end_with_parent, args=(lines,), name="end-with-parent", daemon=True).start()
    folder = TemporaryFolder()
    try:
        _serve(config, settings, folder.path)
    except (ServiceError, OSError) as error:
        lines.write(problem=str(error))
        raise SystemExit(1) from None
    finally:
        folder.cleanup()


def _serve(config: ServerConfig, settings: dict[str, Any], scratch_dir: Path) -> None:
    with without_dynamo():
        from trocar_server.training.fit.ranks.placed_ranks import serve_rank

    load = _loader(config, Path(settings["own_dir"]))
    address, secret, rank = settings["address"], settings["secret"], settings["rank"]
    serve_rank(address, secret, rank, config.host, scratch_dir, load)


def _loader(config: ServerConfig, own_dir: Path) -> "Callable[[str], HostedModel]":
    """Return what loads a model of the configuration, or one that the replica has published."""
    import torch

    from trocar_server.app.specs import model_spec
    from trocar_server.models import load_model
    from trocar_server.training.files.trainer_storage import published_store
    from trocar_server.training.model.head import replace_head

    def load(model_id: str) -> "HostedModel":
        if model_id in config.models:
            spec = model_spec(model_id, config.models[model_id])
        else:
            store = published_store(own_dir)
            published = {model.model_id: model for model in store.entries()}
            spec = store.model_spec(published[model_id], replace_head)
        return load_model(spec, torch.device("cpu"), config.weights_dir)

    return load


def _end_with_parent(lines: ParentLines) -> None:
    """End at once when the input does: the actor has been stopped, or has died with its node."""
    while lines.read() is not None:
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
