"""Assembly of a server: its parts, each built with what it needs. Nothing runs yet.

parts = await assemble(config, {}, ReplicaSetup(), log)
parts.engine, parts.trainers, parts.fits
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc

from trocar_server.app.access import authorizer_of, check_address, credentials_of, insecurity_of
from trocar_server.app.configured_models import catalogue_of
from trocar_server.app.consistency import check_consistency
from trocar_server.app.page_process import PageProcess
from trocar_server.app.specs import dataset_folders
from trocar_server.app.state_folder import settle
from trocar_server.config import ServerConfig
from trocar_server.decoding.pixels import Conversion
from trocar_server.directions import DirectionStore
from trocar_server.edit_store import EditStore
from trocar_server.engine.engine import Engine
from trocar_server.engine.execute.image_decoder import ImageDecoder
from trocar_server.engine.schedule.device import DeviceThread, choose_device
from trocar_server.engine.transfer import transfers_of
from trocar_server.models import Catalogue, clean_downloads
from trocar_server.rpc.call.authorization import ReplaceableAuthorizer
from trocar_server.rpc.call.forwarded import GatewayAccess
from trocar_server.storage.temporary_folder import remove_leftovers
from trocar_server.training.datasets import DatasetLibrary, DatasetStore
from trocar_server.training.elsewhere import Elsewhere
from trocar_server.training.files.owner_folders import OwnerFolders
from trocar_server.training.files.trainer_storage import StorageOnDemand
from trocar_server.training.fit.fitting import Fits
from trocar_server.training.fit.ranks.rank_launch import RankLauncher
from trocar_server.training.publishing import OtherPublishing
from trocar_server.training.takeover import Takeover
from trocar_server.training.trainers import Trainers


@dataclass(frozen=True)
class ReplicaSetup:
    """Setup of a replica of a cluster; the defaults are a server by itself."""

    own_dir: Path | None = None
    """Folder of trainers and fits, where several servers share the data directory; that one when None."""
    gateway: GatewayAccess = field(default_factory=GatewayAccess)
    """Access of the gateways."""
    owners: OwnerFolders | None = None
    """Folders of trainers that several servers share, and take over from each other."""
    published: OtherPublishing | None = None
    """What the other replicas have published."""
    launcher: RankLauncher | None = None
    """Starts the workers of fits; processes of this machine when None."""


@dataclass(frozen=True)
class Assembly:
    """The parts of a server."""

    config: ServerConfig
    setup: ReplicaSetup
    log: Any
    data_dir: Path
    page: PageProcess | None
    credentials: grpc.ServerCredentials | None
    authorizer: ReplaceableAuthorizer
    edit_store: EditStore
    direction_store: DirectionStore
    engine: Engine
    datasets: DatasetLibrary
    storage: StorageOnDemand
    trainers: Trainers
    fits: Fits
    takeover: Takeover | None
    """On a cluster."""


async def assemble(
    config: ServerConfig, factories: Mapping[str, Callable[[], Any]], setup: ReplicaSetup, log: Any
) -> Assembly:
    """Check the configuration, build the parts, and remove what killed servers left.

    Args:
        config: The server's configuration.
        factories: Model factories by model id; each overrides the configured architecture.
        setup: Of a replica of a cluster.
        log: Logger for models and calls.

    Raises:
        ServiceError: A setting cannot be used, or a file that it names.
    """
    check_address(config)
    check_consistency(config)
    page = PageProcess(config) if config.page.enabled else None
    if problem := insecurity_of(config):
        log.warning("insecure", problem=problem, advice="tokens = true, tls_cert and tls_key")
    credentials = credentials_of(config)
    catalogue = catalogue_of(config, factories, log)
    data_dir = await asyncio.to_thread(settle, config, log)
    authorizer = ReplaceableAuthorizer(authorizer_of(config, data_dir, log))
    clean_downloads(config.weights_dir)
    remove_leftovers()
    edit_store = EditStore(data_dir / "edits")
    edit_store.clean()
    direction_store = DirectionStore(data_dir / "directions")
    direction_store.clean()
    engine = _engine(config, catalogue, data_dir)
    datasets = _datasets(config, data_dir, engine.preparation.decoder)
    own_dir = setup.own_dir or data_dir
    storage = StorageOnDemand(own_dir, config.limits.max_checkpoints, owners=setup.owners)
    trainers = _trainers(config, setup, engine, storage, own_dir)
    return Assembly(
        config=config,
        setup=setup,
        log=log,
        data_dir=data_dir,
        page=page,
        credentials=credentials,
        authorizer=authorizer,
        edit_store=edit_store,
        direction_store=direction_store,
        engine=engine,
        datasets=datasets,
        storage=storage,
        trainers=trainers,
        fits=_fits(setup, trainers, datasets, own_dir),
        takeover=None if setup.owners is None else Takeover(setup.owners, trainers),
    )


def _engine(config: ServerConfig, catalogue: Catalogue, data_dir: Path) -> Engine:
    transfers = partial(transfers_of, pinned_bytes=config.engine.pinned_bytes)
    engine = Engine(
        catalogue,
        DeviceThread(choose_device(config.device), config.threads, transfers),
        config.limits,
        config.weights_dir,
        {model_id: model.replicas for model_id, model in config.models.items()},
        config.engine,
        Conversion(config.images.orient, config.images.scale_16_bit),
        data_dir / "compiled",
    )
    engine.compiled.clean()
    engine.preparation.attach()
    return engine


def _datasets(config: ServerConfig, data_dir: Path, decoder: ImageDecoder) -> DatasetLibrary:
    limits = config.limits
    store = DatasetStore(data_dir / "datasets", limits.max_dataset_bytes, limits.max_image_pixels)
    store.clean()
    folders = dataset_folders(config)
    return DatasetLibrary(store, folders, limits.max_image_pixels, decoder.decode_from_thread)


def _trainers(
    config: ServerConfig, setup: ReplicaSetup, engine: Engine, storage: StorageOnDemand, own_dir: Path
) -> Trainers:
    owners = setup.owners
    return Trainers(
        engine,
        storage,
        own_dir / "scratch",
        has_durable_steps=owners is not None and config.cluster.durable_steps,
        elsewhere=None if owners is None else Elsewhere(owners),
        published=setup.published,
    )


def _fits(setup: ReplicaSetup, trainers: Trainers, datasets: DatasetLibrary, own_dir: Path) -> Fits:
    return Fits(
        trainers,
        datasets,
        own_dir / "fits" if setup.owners is None else setup.owners.own,
        own_dir / "scratch",
        is_shared=setup.owners is not None,
        launcher=setup.launcher,
    )
