"""Fitted directions, against scikit-learn on the values that `extract` returns, and hooks in this process."""

# scikit-learn has no types, and transformers half of them.
# pyright: reportMissingTypeStubs=false, reportArgumentType=false, reportAttributeAccessIssue=false

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sklearn.datasets import load_digits
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge
from sklearn.model_selection import GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import trocar
from tests.support.models.causal_models import save_causal
from tests.support.models.transformers_folders import save_family
from tests.support.servers.running_server import RunningServer, running_server
from trocar._request.stored.direction_fits import direction_fit
from trocar._wire.stream_messages import StreamAssembler
from trocar.errors import (
    DirectionExistsError,
    DirectionMismatchError,
    DirectionRejectedError,
    InvalidArgumentError,
    InvalidRequestError,
    ReductionRejectedError,
    UnknownDirectionError,
    UnknownModuleError,
)

COUNT = 240
HAPPY = ("what a lovely day", "I like this very much", "so good, thank you", "great and kind", "a fine gift")
GRIM = (
    "what a dreadful day",
    "I hate this so much",
    "so bad, go away",
    "cruel and rude",
    "a foul trick here",
)
TEXTS = [*HAPPY, *GRIM]
MOODS = ["happy"] * len(HAPPY) + ["grim"] * len(GRIM)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("directions")
    save_family("vit", folder / "vit")
    return folder


@pytest.fixture(scope="module")
def llama(folders: Path) -> Any:
    return save_causal("llama", folders / "llama")


@pytest.fixture(scope="module")
def server(folders: Path, llama: Any) -> Iterator[RunningServer]:
    models = {name: {"source": f"hf:{folders / name}"} for name in ("vit", "llama")}
    models["other"] = {"source": f"hf:{folders / 'llama'}"}
    with running_server(models=models, device="cpu", data_dir=folders / "data") as running:
        yield running


@pytest.fixture
def client(server: RunningServer) -> Iterator[trocar.Client]:
    with trocar.connect(server.address) as connected:
        yield connected
        for model_id, name in {(each.model_id, each.name) for each in connected.directions()}:
            connected.delete_directions(model_id, name)


@pytest.fixture(scope="module")
def images() -> Any:
    pixels = load_digits().images[:COUNT].astype(np.float32) / 16
    return np.repeat(pixels[:, None], 3, axis=1)


@pytest.fixture(scope="module")
def labels() -> Any:
    return np.where(load_digits().target[:COUNT] > 4, "large", "small")


def pooled(client: trocar.Client, model: str, inputs: Any, taps: list[str], **options: Any) -> dict[str, Any]:
    """Return the pooled values of each place, as `extract` returns them."""
    wanted = [trocar.tap(each, reduce=[trocar.pool("avg")], **options) for each in taps]
    return {
        name: np.asarray(value, np.float64) for name, value in client.extract(model, inputs, wanted).items()
    }


def test_a_logistic_direction_is_that_of_scikit_learn(
    client: trocar.Client, images: Any, labels: Any
) -> None:
    fitted = client.fit_direction("vit", images, labels, name="size", batch_size=50)
    values = pooled(client, "vit", images, ["layer[0]", "layer[1]"])
    assert [row.place for row in fitted] == list(values)
    for row in fitted:
        rows = values[row.place]
        model = make_pipeline(StandardScaler(), LogisticRegression(solver="newton-cg", tol=1e-10)).fit(
            rows, labels
        )
        vectors = model[1].coef_ / model[0].scale_
        direction = client.direction("vit", "size", row.place)
        # "small" is the second class of both
        np.testing.assert_allclose(direction.vectors, vectors, rtol=1e-6, atol=1e-6)
        bias = model[1].intercept_ - vectors @ model[0].mean_
        np.testing.assert_allclose(direction.bias, bias, rtol=1e-6, atol=1e-6)
        scores = cross_val_score(model, rows, labels, cv=StratifiedKFold(5))
        np.testing.assert_allclose(row.fold_scores, scores, atol=1e-12)
        areas = cross_val_score(model, rows, labels, cv=StratifiedKFold(5), scoring="roc_auc")
        assert row.auc == pytest.approx(areas.mean(), abs=1e-6)
        assert row.classes == ("large", "small")
    assert fitted.best.score == max(row.score or 0 for row in fitted)
    assert "size: logistic of 240 samples at 2 places of vit" in str(fitted)


def test_folds_of_groups_are_those_of_scikit_learn(client: trocar.Client, images: Any, labels: Any) -> None:
    groups = np.random.default_rng(0).integers(0, 12, COUNT)
    fitted = client.fit_direction(
        "vit", images, labels, "layer[1]", groups=groups, folds=4, standardize=False
    )
    rows = pooled(client, "vit", images, ["layer[1]"])[fitted.best.place]
    model = LogisticRegression(solver="newton-cg", tol=1e-10)
    scores = cross_val_score(model, rows, labels, groups=groups, cv=GroupKFold(4))
    np.testing.assert_allclose(fitted.best.fold_scores, scores, atol=1e-12)


def test_a_ridge_direction_is_that_of_scikit_learn(client: trocar.Client, images: Any) -> None:
    targets = images.mean((1, 2, 3)) * 10
    fitted = client.fit_direction("vit", images, targets, "layer[1]", kind="ridge", l2=0.5, name="ink")
    rows = pooled(client, "vit", images, ["layer[1]"])[fitted.best.place]
    model = make_pipeline(StandardScaler(), Ridge(alpha=0.5)).fit(rows, np.asarray(targets, np.float64))
    read = client.extract("vit", images, [trocar.readout("ink", pooled=True)])
    answers = read[f"{fitted.best.place}:ink"][:, 0]
    np.testing.assert_allclose(answers, model.predict(rows), rtol=1e-4, atol=1e-4)
    direction = client.direction("vit", "ink")
    expected = model[1].coef_ / model[0].scale_
    np.testing.assert_allclose(direction.vectors[0], expected, rtol=1e-6, atol=1e-6)


def test_principal_components_are_those_of_scikit_learn(client: trocar.Client, images: Any) -> None:
    fitted = client.fit_direction("vit", images, taps="layer[1]", kind="pca", k=3, name="axes")
    rows = pooled(client, "vit", images, ["layer[1]"])[fitted.best.place]
    model: Any = PCA(3, svd_solver="full").fit(rows)
    direction = client.direction("vit", "axes")
    np.testing.assert_allclose(direction.vectors, model.components_, atol=1e-6)
    assert fitted.best.score == pytest.approx(model.explained_variance_ratio_.sum(), abs=1e-9)


def test_a_difference_of_means_is_that_of_caa(client: trocar.Client, llama: Any) -> None:
    # Rimsky et al. 2023, arXiv:2312.06681, section 2: the mean of the positives minus that of the negatives,
    # at the last token.
    last = trocar.positions(prompt=[-1])
    fitted = client.fit_direction(
        "llama", TEXTS, MOODS, "layer[*]", kind="mean_difference", positions=last, name="happy", batch_size=3
    )
    values: dict[str, list[Any]] = {f"model.layers.{k}": [] for k in (0, 1)}
    for text in TEXTS:
        run = client.extract("llama", trocar.texts([text]), list(values))
        for place, listed in values.items():
            listed.append(np.asarray(run[place][0, -1], np.float64))
    for row in fitted:
        rows, grim = np.array(values[row.place]), np.array(MOODS) == "grim"
        vector = client.direction("llama", "happy", row.place).vectors[0]
        np.testing.assert_allclose(vector, rows[~grim].mean(0) - rows[grim].mean(0), rtol=1e-4, atol=1e-5)
        assert row.mean_norm == pytest.approx(np.linalg.norm(rows, axis=1).mean(), rel=1e-4)


def test_padding_is_left_out_of_the_means(client: trocar.Client) -> None:
    alone = client.fit_direction("llama", TEXTS, MOODS, "layer[1]", kind="mean_difference", batch_size=1)
    together = client.fit_direction("llama", TEXTS, MOODS, "layer[1]", kind="mean_difference", batch_size=10)
    one, all_at_once = (client.direction("llama", each.name).vectors for each in (alone, together))
    np.testing.assert_allclose(one, all_at_once, rtol=1e-4, atol=1e-6)
    assert alone.best.mean_norm == pytest.approx(together.best.mean_norm, rel=1e-5)


def test_a_readout_is_the_direction_at_each_token(client: trocar.Client) -> None:
    fitted = client.fit_direction("llama", TEXTS, MOODS, name="mood")
    taps: list[Any] = [trocar.readout("mood"), "layer[*]"]
    maps = client.extract("llama", TEXTS[0], taps)
    for row in fitted:
        direction = client.direction("llama", "mood", row.place)
        read = maps[f"{row.place}:mood"]
        assert read.shape == (*maps[row.place].shape[:2], 1)
        np.testing.assert_allclose(read, direction.read(maps[row.place]), rtol=1e-4, atol=1e-5)
        assert maps.info[f"{row.place}:mood"].axes == ("batch", "tokens", "")
    one = client.extract("llama", TEXTS[0], trocar.readout("mood", "layer[1]", alias="score"))
    np.testing.assert_array_equal(one["score"], maps[f"{fitted.rows[1].place}:mood"])


def test_a_readout_is_read_at_each_generated_token(client: trocar.Client) -> None:
    client.fit_direction("llama", TEXTS, MOODS, name="mood")
    run = client.generate(
        "llama", TEXTS[0], taps=[trocar.readout("mood", "layer[0]"), "layer[0]"], max_new_tokens=5
    )
    value, read = run["model.layers.0"], run["model.layers.0:mood"]
    direction = client.direction("llama", "mood", "layer[0]")
    np.testing.assert_allclose(read, direction.read(value), rtol=1e-4, atol=1e-5)
    assert run.positions("model.layers.0:mood") == run.positions("model.layers.0")


def test_edits_with_a_direction_are_those_with_its_vector(client: trocar.Client) -> None:
    fitted = client.fit_direction("llama", TEXTS, MOODS, name="mood", standardize=False)
    place, row = fitted.rows[0].place, fitted.rows[0]
    w = client.direction("llama", "mood", place).vectors[0]
    unit = w / np.linalg.norm(w)
    edit = trocar.edit
    pairs = [
        (edit("layer[0]", "steer", "mood", alpha=4), edit("layer[0]", "steer", w, alpha=4)),
        (
            edit("layer[0]", "steer", "mood", alpha=0.5, units="norm"),
            edit("layer[0]", "steer", unit * row.mean_norm, alpha=0.5),
        ),
        (edit(place, "project_out", "mood"), edit(place, "project_out", w[None])),
        (edit(place, "cap", "mood", low=0.1), edit(place, "cap", w, low=0.1)),
        (
            edit(place, "cap", "mood", high=-0.1, units="norm"),
            edit(place, "cap", w, high=-0.1 * row.mean_norm),
        ),
    ]
    for named, given in pairs:
        maps = [client.extract("llama", TEXTS, ["layer[1]", place], edits=[each]) for each in (named, given)]
        for name in maps[0]:
            np.testing.assert_array_equal(maps[0][name], maps[1][name])
        runs = [client.generate("llama", TEXTS[0], edits=[each], max_new_tokens=6) for each in (named, given)]
        assert runs[0].token_ids == runs[1].token_ids
    capped = client.extract("llama", TEXTS[0], place, edits=[edit(place, "cap", "mood", low=0.1, high=0.2)])
    inside = capped[place] @ unit
    assert (inside > 0.1 - 1e-5).all()
    assert (inside < 0.2 + 1e-5).all()


def test_values_do_not_cross_the_wire(server: RunningServer, images: Any, labels: Any) -> None:
    received = []
    with trocar.connect(server.address, direct=False) as client:
        feed = StreamAssembler.feed
        with pytest.MonkeyPatch.context() as patched:

            def counted(self: Any, message: bytes) -> Any:
                received.append(len(message))
                return feed(self, message)

            patched.setattr(StreamAssembler, "feed", counted)
            fitted = client.fit_direction("vit", images, labels, name="counted", batch_size=20)
        client.delete_directions("vit", "counted")
    row_bytes = 4 * sum(row.channel_count for row in fitted)
    assert len(received) == COUNT // 20 + 1
    assert sum(received) < 20 * len(received) + 2_000 < row_bytes * COUNT


def test_what_nothing_can_be_fitted_to_is_refused(client: trocar.Client, images: Any, labels: Any) -> None:
    def refused(match: str, *arguments: Any, **options: Any) -> None:
        with pytest.raises(DirectionRejectedError, match=match):
            client.fit_direction("vit", *arguments, **options)

    few, of_few = images[:8], labels[:8]
    refused("all 8 samples are of one class, 'a'", few, ["a"] * 8)
    refused("group 0 is in folds 0, 1", few, of_few, groups=[0] * 8, folds=[0, 1] * 4)
    refused("3 folds of 2 groups", few, of_few, groups=[0, 1] * 4, folds=3)
    refused("8 components of 8 samples", few, kind="pca", k=8)
    refused("a difference of means has two classes", few, list("abcabcab"), kind="mean_difference")
    refused("class 'b' has 1 samples", few, list("aaaaaaab"))
    refused("all targets are equal", few, [1.0] * 8, kind="ridge")
    with pytest.raises(ValueError, match="7 labels for 8 samples"):
        client.fit_direction("vit", few, of_few[:7])
    with pytest.raises(UnknownModuleError, match=r"no numbered stages 'block\[0\]'.*layer\[\*\]"):
        client.fit_direction("vit", few, of_few, "block[*]", folds=0)
    assert client.directions() == []


def test_values_over_the_budget_are_refused_before_a_pass(folders: Path, images: Any, labels: Any) -> None:
    limits = {"max_direction_fit_bytes": 4096}
    models = {"vit": {"source": f"hf:{folders / 'vit'}"}}
    with (
        running_server(models=models, device="cpu", limits=limits) as running,
        trocar.connect(running.address) as client,
        pytest.raises(DirectionRejectedError, match="are 17,280 bytes, and the server keeps 4,096"),
    ):
        client.fit_direction("vit", images, labels)


def test_a_direction_belongs_to_its_place_and_model(client: trocar.Client) -> None:
    client.fit_direction("llama", TEXTS, MOODS, "layer[0]", name="mood", folds=0)
    with pytest.raises(
        DirectionMismatchError, match=r"not fitted at 'model\.layers\.1', but at model\.layers\.0"
    ):
        client.extract("llama", TEXTS[0], trocar.readout("mood", "layer[1]"))
    with pytest.raises(DirectionMismatchError, match=r"not fitted at 'model\.layers\.1'"):
        client.extract("llama", TEXTS[0], "layer[1]", edits=[trocar.edit("layer[1]", "steer", "mood")])
    with pytest.raises(UnknownDirectionError, match="it is of model 'llama', not of model 'other'"):
        client.extract("other", TEXTS[0], trocar.readout("mood"))
    with pytest.raises(DirectionExistsError, match="already exist"):
        client.fit_direction("llama", TEXTS, MOODS, "layer[0]", name="mood", folds=0)
    with pytest.raises(UnknownDirectionError, match="no direction 'moody'; nearest: mood"):
        client.extract("llama", TEXTS[0], trocar.readout("moody"))
    with pytest.raises(ReductionRejectedError):
        client.store_direction("llama", "short", "layer[0]", trocar.Direction.of(np.ones(3)))
    stored = client.directions("llama")
    assert [(each.name, each.place, each.problem) for each in stored] == [("mood", "model.layers.0", "")]
    again = client.fit_direction("llama", TEXTS, MOODS, "layer[0]", name="mood", folds=0, replace=True)
    assert again.rows[0].digest == stored[0].digest


def test_a_direction_of_another_model_is_refused(folders: Path) -> None:
    torch.manual_seed(7)
    save_causal("llama", folders / "changing")
    data_dir = folders / "changing-data"
    models = {"llama": {"source": f"hf:{folders / 'changing'}"}}
    settings: dict[str, Any] = {"models": models, "device": "cpu", "data_dir": data_dir}
    with running_server(**settings) as running, trocar.connect(running.address) as client:
        client.fit_direction("llama", TEXTS, MOODS, "layer[0]", name="mood", folds=0)
    path = folders / "changing" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.mlp.down_proj.weight"] += 1
    save_file(weights, path, metadata={"format": "pt"})
    with (
        running_server(**settings) as running,
        trocar.connect(running.address) as client,
        pytest.raises(DirectionMismatchError, match="weights, code or settings have changed"),
    ):
        client.extract("llama", TEXTS[0], trocar.readout("mood"))


def test_a_stored_direction_comes_back_as_it_was(client: trocar.Client, tmp_path: Path) -> None:
    vector = np.random.default_rng(0).normal(size=16)
    direction = trocar.Direction.of(vector, 0.5, mean_norm=2.0)
    stored = client.store_direction("llama", "mine", "layer[1]", direction)
    assert (stored.place, stored.kind, stored.mean_norm) == ("model.layers.1", "given", 2.0)
    client.direction("llama", "mine").save(tmp_path / "mine.safetensors")
    again = trocar.Direction.load(tmp_path / "mine.safetensors")
    np.testing.assert_array_equal(again.vectors[0], vector)
    assert again.about["digest"] == stored.digest
    client.store_direction("llama", "mine", "layer[0]", trocar.Direction.of(-vector))
    assert [each.place for each in client.directions()] == ["model.layers.1", "model.layers.0"]
    maps = client.extract("llama", TEXTS[0], [trocar.readout("mine", "layer[1]"), "layer[1]"])
    np.testing.assert_allclose(
        maps["model.layers.1:mine"], again.read(maps["model.layers.1"]), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("about", [{"kind": "magic"}, {"kind": "given", "positions": "zz"}, {"kind": 3}])
def test_a_file_that_says_something_impossible_is_refused(
    client: trocar.Client, about: dict[str, Any]
) -> None:
    direction = trocar.Direction(np.ones((1, 16)), np.zeros(1), {"place": "", **about})
    with pytest.raises(InvalidArgumentError, match="file"):
        client.store_direction("llama", "odd", "layer[0]", direction)
    assert client.directions() == []


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"edits": [trocar.edit("layer[0]", "zero")]}, "edits: a fit of directions does not take it"),
        ({"adapter": "style"}, "adapter: a fit of directions does not take it"),
        ({"running_statistics": True}, "has_running_statistics: a fit"),
        ({"taps": [trocar.tap("layer[0]", stats=["mean"])]}, "a selector and positions alone"),
        ({"taps": ["model.layers.0.mlp.up_proj/param(weight)"]}, "is no value of the forward pass"),
    ],
)
def test_a_stream_with_more_than_a_fit_is_refused(
    server: RunningServer, options: dict[str, Any], problem: str
) -> None:
    message = direction_fit(
        name="x",
        kind="pca",
        sample_count=10,
        labels=None,
        folds=0,
        groups=None,
        l2=1.0,
        class_weight=None,
        standardize=None,
        k=1,
        replace=False,
    )
    taps = options.pop("taps", ["layer[0]"])
    with trocar.connect(server.address) as client:
        stream = client.extract_stream("llama", [TEXTS], taps, **options)
        stream._options = replace(stream._options, direction_fit=message)
        stream._sender._options = stream._options
        with stream, pytest.raises(InvalidRequestError, match=problem):
            next(stream)
