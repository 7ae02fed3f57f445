"""Configuration checks: models, their files, data sets."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from trocar_server.app.consistency import check_consistency
from trocar_server.app.specs import model_spec
from trocar_server.config import ModelConfig, ServerConfig
from trocar_server.doctor.finding import Finding, fail, ok, warn
from trocar_server.engine.compiled.backends.availability import available_numerics
from trocar_server.engine.request.numerics import Numerics
from trocar_server.errors import ServiceError
from trocar_server.models import Catalogue, ModelSpec
from trocar_server.models.architectures import find_weights
from trocar_server.models.spec import WeightsKind
from trocar_server.models.weights.downloads import stored_path
from trocar_server.surgery import parse_selector


def check_models(config: ServerConfig) -> Iterator[Finding]:
    """Check that every model can be built, as far as that shows without building it."""
    catalogue, weights_dir = Catalogue(), config.weights_dir
    if not config.models:
        yield ok("models", "none is configured; clients can load torchvision's")
    for model_id, model in config.models.items():
        yield _checked(catalogue, model_id, model, weights_dir)


def check_settings(config: ServerConfig) -> Iterator[Finding]:
    """Check that settings do not contradict each other."""
    try:
        check_consistency(config)
    except ServiceError as error:
        yield fail("settings", error.message, "correct them in the configuration")


def check_warm_variants(config: ServerConfig) -> Iterator[Finding]:
    """Check that warm variants can be built, as far as that shows without the models."""
    engine = config.engine
    result = available_numerics(compiles=bool(engine.compile_after), uses_openvino=engine.openvino)
    for model_id, model in config.models.items():
        for wanted in model.warm_variants:
            subject = f"warm variant of {model_id}"
            problem = _selector_problem(wanted.taps)
            if problem:
                yield fail(subject, problem, "correct `taps` of its `warm_variants`")
            elif reason := result[Numerics(wanted.numerics)]:
                yield warn(subject, reason, "change that, or remove its `warm_variants`")
            else:
                yield ok(subject, f"{', '.join(wanted.taps)} in {wanted.numerics}")


def _selector_problem(taps: Sequence[str]) -> str:
    """Return why a selector is malformed; empty where none is."""
    try:
        for text in taps:
            parse_selector(text)
    except ServiceError as error:
        return error.message
    return ""


def check_datasets(config: ServerConfig) -> Iterator[Finding]:
    """Check that every data set is a folder with folders in it."""
    for name, dataset in config.datasets.items():
        folder = dataset.path.expanduser()
        try:
            classes = sum(entry.is_dir() for entry in folder.iterdir())
        except OSError as error:
            yield fail(f"data set {name}", f"'{folder}': {error.strerror}", "correct its path")
            continue
        if classes:
            yield ok(f"data set {name}", f"{classes} classes")
        else:
            text = f"'{folder}' has no folders; each class is one"
            yield fail(f"data set {name}", text, "sort the images into a folder for each class")


def _checked(catalogue: Catalogue, model_id: str, model: ModelConfig, weights_dir: Path) -> Finding:
    subject = f"model {model_id}"
    try:
        spec = model_spec(model_id, model)
        catalogue.add(spec)
    except ServiceError as error:
        return fail(subject, error.message, "correct its entry in the configuration")
    path = _weights_path(spec, weights_dir)
    if path is None:
        return ok(subject, f"weights {model.weights}")
    if path.is_file():
        return ok(subject, f"'{path.name}', {path.stat().st_size / 2**20:.0f} MiB")
    if spec.weights_kind is WeightsKind.FILE:
        return fail(
            subject,
            f"file '{path}' does not exist",
            "correct `weights`; write the file with trocar admin convert",
        )
    advice = f"without network, put a converted file at '{path}'"
    return warn(subject, f"its weights {model.weights} are downloaded at the next start", advice)


def _weights_path(spec: ModelSpec, weights_dir: Path) -> Path | None:
    """Return the file that its weights come from, or None where they come from none."""
    if spec.weights_kind is WeightsKind.FILE:
        return Path(spec.weights).expanduser()
    if spec.weights_kind is WeightsKind.RANDOM or spec.is_custom:
        return None
    return stored_path(find_weights(spec.architecture, spec.weights), weights_dir)
