"""The models that a server knows, loaded or not. Data only: loading is the engine's work."""

from dataclasses import dataclass
from enum import StrEnum, unique

from trocar_api.reasons import ErrorReason
from trocar_server.errors import ServiceError, unknown
from trocar_server.models.architectures import architecture_names, check_spec, named_weights, weights_label
from trocar_server.models.families import Family, family_of
from trocar_server.models.hosted import HostedModel
from trocar_server.models.principals import current_principal
from trocar_server.models.spec import DEFAULT_WEIGHTS, ModelSpec, WeightsKind

_ADVICE = "see `trocar models`"
_ARCHITECTURE_ADVICE = "any of torchvision.models.list_models() can be loaded"


@unique
class ModelState(StrEnum):
    """Whether a model can be used."""

    UNLOADED = "UNLOADED"
    LOADING = "LOADING"
    LOADED = "LOADED"
    FAILED = "FAILED"


@dataclass(eq=False)
class Entry:
    """One model of the catalogue. The engine moves it from state to state."""

    spec: ModelSpec
    """What to load."""
    state: ModelState = ModelState.UNLOADED
    """Whether it can be used."""
    hosted: HostedModel | None = None
    """The model in memory; set exactly while `LOADED`."""
    error_message: str = ""
    """Why the last attempt to load failed; empty otherwise."""
    owner: str | None = None
    """The one principal that sees it; None for a model of the catalogue, which all see."""

    @property
    def family(self) -> Family:
        """The kind of task, known before loading."""
        return family_of(self.spec.architecture)

    @property
    def weights(self) -> str:
        """The name of the weights for the wire, known before loading; never a path."""
        return self.hosted.weights if self.hosted else weights_label(self.spec)


class Catalogue:
    """Entries by model id. Not thread-safe: it belongs to one event loop.

    Guests are entries that one principal sees: to others they read as absent.
    """

    def __init__(self) -> None:
        self._entries: dict[str, Entry] = {}

    def get(self, model_id: str) -> Entry:
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
        """Return `catalogue` for an entry that all see, `guest` for one that its owner sees, or empty."""
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
            why = f" ({entry.error_message})" if entry.error_message else ""
            raise ServiceError(
                ErrorReason.MODEL_NOT_LOADED,
                f"model '{model_id}' is {entry.state.lower()}{why}; load it first",
            )
        return entry.hosted

    def entries(self) -> list[Entry]:
        """Return every entry but guests, ordered by id."""
        entries = [self._entries[model_id] for model_id in sorted(self._entries)]
        return [entry for entry in entries if entry.owner is None]

    def adopt(self, hosted: HostedModel, owner: str) -> Entry:
        """Add a guest, which is in memory already."""
        model_id = hosted.spec.model_id
        return self._entries.setdefault(model_id, Entry(hosted.spec, ModelState.LOADED, hosted, owner=owner))

    def release(self, model_id: str) -> None:
        """Take a guest out, if there is one."""
        self._entries.pop(model_id, None)

    def has(self, model_id: str) -> bool:
        """Tell whether an id is taken, whoever may see what has it."""
        return model_id in self._entries

    def put(self, hosted: HostedModel) -> None:
        """Put a model that is in memory in the place of whatever had its id."""
        self._entries[hosted.spec.model_id] = Entry(hosted.spec, ModelState.LOADED, hosted)

    def add(self, spec: ModelSpec) -> Entry:
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
        return self._entries.setdefault(spec.model_id, Entry(spec))

    def remove(self, model_id: str) -> None:
        """Forget a model that is not in memory, so that another may have its id.

        Raises:
            ServiceError: `UNKNOWN_MODEL`; `MODEL_CONFLICT`, it is loaded or being loaded.
        """
        if self.get(model_id).state in (ModelState.LOADED, ModelState.LOADING):
            raise ServiceError(
                ErrorReason.MODEL_CONFLICT, f"model '{model_id}' is in memory; unload it first"
            )
        del self._entries[model_id]

    def request(self, model_id: str, weights: str = "") -> Entry:
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
        if existing is None or existing.owner is not None:  # somebody else's is as if it were not there
            return self.add(client_spec(model_id, weights))
        if weights and weights != existing.weights and not _same_weights(existing.spec, weights):
            raise _conflict(existing)
        return existing


def guest_refused(model_id: str) -> ServiceError:
    """Build the error for loading and unloading what is no model of the catalogue."""
    return ServiceError(
        ErrorReason.INVALID_ARGUMENT,
        f"'{model_id[:80]}' is no model that can be loaded or unloaded; a trainer is closed instead",
    )


def client_spec(model_id: str, weights: str = "") -> ModelSpec:
    """Return the spec of a model that a client names: torchvision's architectures and weights only.

    Files and factories are the operator's to name; whatever looks like one is an unknown name here.

    Raises:
        ServiceError: `UNKNOWN_ARCHITECTURE` or `UNKNOWN_WEIGHTS`, with what there is.
    """
    names = architecture_names()
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
        f"'{model_id}' has no weights '{weights[:80]}' for clients; available: {', '.join(available)}",
        available=", ".join(available),
    )


def _same(one: ModelSpec, other: ModelSpec) -> bool:
    if one == other:
        return True
    both_plain = _plain(one) and _plain(other) and one.architecture == other.architecture
    return both_plain and _same_weights(one, other.weights)


def _plain(spec: ModelSpec) -> bool:
    """Whether nothing but the weights was chosen: only then do equal labels mean equal models."""
    return spec == ModelSpec(spec.model_id, spec.architecture, spec.weights)


def _same_weights(spec: ModelSpec, weights: str) -> bool:
    """Whether weights by another name are the same: `DEFAULT` and its member, `random` and `random:0`."""
    if weights == spec.weights:
        return True
    try:
        other = client_spec(spec.architecture, weights)
    except ServiceError:
        return False
    return weights_label(other) == weights_label(spec)


def _conflict(entry: Entry) -> ServiceError:
    return ServiceError(
        ErrorReason.MODEL_CONFLICT,
        f"model '{entry.spec.model_id}' is in the catalogue with weights '{entry.weights}'; "
        "ask for it without weights, or have the operator add another id",
        weights=entry.weights,
    )
