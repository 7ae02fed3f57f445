"""Model catalogue: every known model, loaded or not. Data only: the engine loads models."""

from dataclasses import dataclass
from enum import StrEnum, unique

from trocar_api.reasons import ErrorReason
from trocar_server.caller import current_principal
from trocar_server.errors import ServiceError, nearest, unknown
from trocar_server.models.architectures import architecture_names, check_spec, named_weights, weights_label
from trocar_server.models.families import Family, family_of
from trocar_server.models.from_source import known_timm_names
from trocar_server.models.hosted import HostedModel
from trocar_server.models.source import is_source
from trocar_server.models.spec import DEFAULT_WEIGHTS, ModelSpec, WeightsKind

_UNKNOWN_ARCHITECTURE = "unknown"
_ADVICE = "see `trocar models`"
_ARCHITECTURE_ADVICE = "any of torchvision.models.list_models() can be loaded"


@unique
class ModelState(StrEnum):
    """Load state of a model."""

    UNLOADED = "UNLOADED"
    LOADING = "LOADING"
    LOADED = "LOADED"
    FAILED = "FAILED"


@dataclass(eq=False)
class CatalogueEntry:
    """One model of the catalogue. The engine moves it from state to state."""

    spec: ModelSpec
    """The spec to load."""
    state: ModelState = ModelState.UNLOADED
    """Its load state."""
    hosted: HostedModel | None = None
    """The model in memory; set exactly while `LOADED`."""
    error_message: str = ""
    """Why the last attempt to load failed; empty otherwise."""
    error_reason: ErrorReason | None = None
    """The error reason of that failure."""
    is_spec_known: bool = True
    """False if the configuration could not be read: then `spec` has nothing but the id."""
    is_requested: bool = False
    """Whether a client asked for it by name; the others come from the configuration, or were published."""
    owner: str | None = None
    """The only principal that sees it; None for a model of the catalogue, visible to all."""

    @property
    def family(self) -> Family:
        """The kind of task, known before loading."""
        return family_of(self.spec.architecture) if self.is_spec_known else Family.CUSTOM

    @property
    def weights(self) -> str:
        """The name of the weights for the wire, known before loading; never a path. Empty where unknown."""
        if not self.is_spec_known:
            return ""
        return self.hosted.weights if self.hosted else weights_label(self.spec)

    def fail(self, error: ServiceError) -> None:
        """Mark it as failed, with the reason."""
        self.state, self.error_message, self.error_reason = ModelState.FAILED, error.message, error.reason

    def forget(self) -> None:
        """Mark it as unloaded; why it failed before is no longer said."""
        self.hosted, self.state, self.error_message, self.error_reason = None, ModelState.UNLOADED, "", None

    def begin(self) -> None:
        """Mark it as loading, or waiting to be loaded."""
        self.state, self.error_message, self.error_reason = ModelState.LOADING, "", None


class Catalogue:
    """Entries by model id. Not thread-safe: it belongs to one event loop.

    Guests are entries visible to one principal: to others they are absent.
    """

    def __init__(self) -> None:
        self._entries: dict[str, CatalogueEntry] = {}

    def get(self, model_id: str) -> CatalogueEntry:
        """Return an entry.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, with the nearest ids.
        """
        entry = self._entries.get(model_id)
        if entry is None or entry.owner not in (None, current_principal()):
            names = [name for name, other in self._entries.items() if other.owner is None]
            raise unknown(ErrorReason.UNKNOWN_MODEL, "model", model_id[:80], names, _ADVICE)
        return entry

    def kind_of(self, model_id: str) -> str:
        """`catalogue` for an entry visible to all, `guest` for one visible to its owner, or empty."""
        entry = self._entries.get(model_id)
        if entry is None:
            return ""
        return "catalogue" if entry.owner is None else "guest"

    def loaded(self, model_id: str) -> HostedModel:
        """Return a model that is in memory.

        Raises:
            ServiceError: `UNKNOWN_MODEL`, or `MODEL_NOT_LOADED` with its state.
        """
        entry = self.get(model_id)
        if entry.hosted is None:
            raise _not_loaded(entry)
        return entry.hosted

    def entries(self) -> list[CatalogueEntry]:
        """Return every entry but guests, ordered by id."""
        entries = [self._entries[model_id] for model_id in sorted(self._entries)]
        return [entry for entry in entries if entry.owner is None]

    def adopt(self, hosted: HostedModel, owner: str) -> CatalogueEntry:
        """Add a guest, which is in memory already."""
        model_id = hosted.spec.model_id
        return self._entries.setdefault(
            model_id, CatalogueEntry(hosted.spec, ModelState.LOADED, hosted, owner=owner)
        )

    def release(self, model_id: str) -> None:
        """Remove a guest, if there is one."""
        self._entries.pop(model_id, None)

    def has(self, model_id: str) -> bool:
        """Whether an id is in use, by an entry of any visibility."""
        return model_id in self._entries

    def holds(self, entry: CatalogueEntry) -> bool:
        """Whether an entry is still the one of its id."""
        return self._entries.get(entry.spec.model_id) is entry

    def put(self, hosted: HostedModel) -> None:
        """Store a model that is in memory, replacing any entry with its id."""
        self._entries[hosted.spec.model_id] = CatalogueEntry(hosted.spec, ModelState.LOADED, hosted)

    def add(self, spec: ModelSpec) -> CatalogueEntry:
        """Add a model, unloaded; an equal spec of an existing id changes nothing.

        Raises:
            ServiceError: `MODEL_CONFLICT`, the id has another spec; `UNKNOWN_ARCHITECTURE`,
                `UNKNOWN_WEIGHTS` or `MODEL_INVALID`, the spec cannot be loaded.
        """
        existing = self._entries.get(spec.model_id)
        if existing is not None:
            if not _same(existing.spec, spec):
                raise _conflict(existing)
            return existing
        check_spec(spec)
        return self._entries.setdefault(spec.model_id, CatalogueEntry(spec))

    def add_failed(self, model_id: str, error: ServiceError) -> CatalogueEntry:
        """Add a model whose configuration is invalid, so that it is listed with the reason.

        An id that is in use, or invalid, changes nothing.

        Args:
            model_id: Its id.
            error: Why.
        """
        entry = CatalogueEntry(ModelSpec(model_id, _UNKNOWN_ARCHITECTURE), is_spec_known=False)
        entry.fail(error)
        return self._entries.setdefault(model_id, entry)

    def remove(self, model_id: str) -> None:
        """Remove a model that is not in memory; its id becomes free.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, it is loaded or being loaded.
        """
        if self.get(model_id).state in (ModelState.LOADED, ModelState.LOADING):
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT, f"model '{model_id}' is in memory; unload it first"
            )
        del self._entries[model_id]

    def request(self, model_id: str, weights: str = "") -> CatalogueEntry:
        """Return the entry that a client asks to load; add one for a torchvision name that is new.

        Args:
            model_id: The id of an entry, or a torchvision model name.
            weights: Empty for the entry's own or `DEFAULT`; `random[:seed]` or an enum name.

        Raises:
            ServiceError: `MODEL_CONFLICT`, the entry has other weights; `UNKNOWN_ARCHITECTURE` or
                `UNKNOWN_WEIGHTS`, as `client_spec` does.
        """
        existing = self._entries.get(model_id)
        if existing is not None and existing.owner is not None and existing.owner == current_principal():
            raise guest_refused(model_id)
        if existing is None or existing.owner is not None:  # another principal's counts as absent
            added = self.add(client_spec(model_id, weights))
            added.is_requested = True
            return added
        if existing.is_requested and weights and existing.state is ModelState.FAILED:
            return self._requested_again(client_spec(model_id, weights))
        if weights and weights != existing.weights and not _same_weights(existing.spec, weights):
            raise _conflict(existing)
        return existing

    def _requested_again(self, spec: ModelSpec) -> CatalogueEntry:
        """Return the entry of a model that a client asked for, with the weights asked for now."""
        if not _same(self._entries[spec.model_id].spec, spec):
            check_spec(spec)
            self._entries[spec.model_id] = CatalogueEntry(spec, is_requested=True)
        return self._entries[spec.model_id]


def _not_loaded(entry: CatalogueEntry) -> ServiceError:
    """Error for a call to a model that is not in memory, with the cause if loading failed."""
    model_id, why = entry.spec.model_id, entry.error_message
    if entry.state is ModelState.FAILED:
        message = f"model '{model_id}' could not be loaded: {why}; fix the cause, then load it again"
        return ServiceError(ErrorReason.MODEL_NOT_LOADED, message, cause=entry.error_reason or "")
    advice = "wait for it (wait_ready)" if entry.state is ModelState.LOADING else "load it first"
    return ServiceError(
        ErrorReason.MODEL_NOT_LOADED, f"model '{model_id}' is {entry.state.lower()}; {advice}"
    )


def guest_refused(model_id: str) -> ServiceError:
    """Error for loading or unloading a model that is not in the catalogue."""
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"'{model_id[:80]}' is not a model that can be loaded or unloaded; trainers are closed, not unloaded",
    )


def client_spec(model_id: str, weights: str = "") -> ModelSpec:
    """Return the spec of a model that a client names: torchvision's architectures and weights only.

    Only operators may name files and factories; here such a name is unknown.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE` or `UNKNOWN_WEIGHTS`, with what there is.
    """
    names = architecture_names()
    if is_source(model_id):
        raise ServiceError(ErrorReason.UNKNOWN_ARCHITECTURE, _of_operator(model_id))
    if model_id not in names:
        raise unknown(
            ErrorReason.UNKNOWN_ARCHITECTURE, "architecture", model_id[:80], names, _ARCHITECTURE_ADVICE
        )
    available = [*named_weights(model_id), "random[:seed]"]
    spec = ModelSpec(model_id, model_id, weights or DEFAULT_WEIGHTS)
    if spec.weights_kind is WeightsKind.RANDOM or spec.weights in available:
        return spec
    raise ServiceError(
        ErrorReason.UNKNOWN_WEIGHTS,
        f"'{model_id}' has no weights '{weights[:80]}' that a client may load; available: "
        f"{', '.join(available)}",
        available=", ".join(available),
    )


def _of_operator(source: str) -> str:
    """Return why a client cannot load a source, and how the operator hosts it."""
    library, _, name = source.partition(":")
    names = (
        architecture_names() if library == "torchvision" else known_timm_names() if library == "timm" else []
    )
    near = nearest(name, names)
    hint = f"; nearest in {library}: {', '.join(near)}" if near and name not in names else ""
    own = f"; load it as '{name}'" if library == "torchvision" and name in names else ""
    return (
        f"'{source[:80]}' is a source, which only the operator can add: [models.ID] source = \"...\" in the "
        f"configuration, or trocar serve {source[:80]}; a client loads torchvision's architectures{own}{hint}"
    )


def _same(one: ModelSpec, other: ModelSpec) -> bool:
    if one == other:
        return True
    both_plain = _plain(one) and _plain(other) and one.architecture == other.architecture
    return both_plain and _same_weights(one, other.weights)


def _plain(spec: ModelSpec) -> bool:
    """Whether only the weights were set: only then do equal labels mean equal models."""
    return spec == ModelSpec(spec.model_id, spec.architecture, spec.weights)


def _same_weights(spec: ModelSpec, weights: str) -> bool:
    """Whether two names mean the same weights: `DEFAULT` and its member, `random` and `random:0`."""
    if weights == spec.weights:
        return True
    try:
        other = client_spec(spec.architecture, weights)
    except ServiceError:
        return False
    return weights_label(other) == weights_label(spec)


def _conflict(entry: CatalogueEntry) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_CONFLICT,
        f"model '{entry.spec.model_id}' is in the catalogue with weights '{entry.weights}'; "
        "load it without `weights`, or ask the operator to add another id",
        weights=entry.weights,
    )
