import json
import pickle
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from PIL import Image
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import trocar
from trocar._result import feature_maps
from trocar._result.processed import ProcessedInput, ProcessedSample

SHAPES = {"layer1.0.relu@1": (2, 5, 4, 4), "blocks": (2, 7, 9), "fc": (2, 10), "odd/in[0]": (3,)}


def info(name: str, shape: tuple[int, ...], has_values: bool = True) -> trocar.FeatureMapInfo:
    return trocar.FeatureMapInfo(name, name, "Conv2d", 0, "out", "", shape, "float32", has_values)


@pytest.fixture
def maps() -> trocar.FeatureMaps:
    rng = np.random.default_rng(0)
    return trocar.FeatureMaps(
        {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()},
        info={
            **{name: info(name, shape) for name, shape in SHAPES.items()},
            "only": info("only", (9,), has_values=False),
        },
        stats={"only": trocar.Statistics({"mean": 1.5})},
        expansions={"layer1.*": ("layer1.0.relu@1",), "**": ("blocks", "fc"), "on*": ("only",)},
        timing=trocar.ServerTiming(0.0, 0.1),
        model_id="resnet18",
        objective=-2.5,
        edit_expansions={"layer*": ("layer1", "layer2")},
    )


def test_it_is_a_mapping_of_what_has_values(maps: trocar.FeatureMaps) -> None:
    assert list(maps) == list(SHAPES)
    assert len(maps) == 4
    assert "fc" in maps
    assert "only" not in maps


def test_a_selector_that_stands_for_one_value_is_a_key(maps: trocar.FeatureMaps) -> None:
    assert maps["layer1.*"] is maps["layer1.0.relu@1"]


def test_statistics_and_facts_are_found_by_such_a_selector_too(maps: trocar.FeatureMaps) -> None:
    assert maps.info["layer1.*"] is maps.info["layer1.0.relu@1"]
    assert maps.info.get("layer1.*") is maps.info["layer1.0.relu@1"]
    assert maps.stats["on*"].mean == 1.5
    assert maps.stats.get("fc") is None
    assert list(maps.stats) == ["only"]
    with pytest.raises(KeyError, match="2 feature maps: blocks, fc"):
        maps.info["**"]
    with pytest.raises(KeyError, match="nearest: blocks"):
        maps.info["blcks"]
    assert pickle.loads(pickle.dumps(maps)).stats["on*"].mean == 1.5


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("blcks", "nearest: blocks"),
        ("zzz", "available: layer1"),
        ("**", "2 feature maps: blocks, fc"),
        ("only", "values=False"),
        ("on*", "values=False"),
    ],
)
def test_a_key_that_gives_nothing_says_why(maps: trocar.FeatureMaps, key: str, expected: str) -> None:
    with pytest.raises(KeyError, match=expected.replace("*", r"\*")):
        maps[key]


def test_arrays_are_shared_with_torch_without_a_warning(maps: trocar.FeatureMaps) -> None:
    for tensor in (torch.from_numpy(maps["fc"]), torch.utils.dlpack.from_dlpack(maps["fc"])):
        tensor[0, 0] = 42.0
        assert maps["fc"][0, 0] == 42.0
        maps["fc"][0, 0] = 0.0


def test_it_cannot_be_changed(maps: trocar.FeatureMaps) -> None:
    with pytest.raises(TypeError):
        maps["fc"] = np.zeros(1)  # type: ignore[index]  # the very thing that must not work


def test_a_file_that_cannot_be_written_leaves_the_old_one(
    maps: trocar.FeatureMaps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "features.safetensors"
    maps.save(path)
    before = path.read_bytes()
    monkeypatch.setattr(feature_maps, "save_file", Mock(side_effect=OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        maps.save(path)
    assert (path.read_bytes(), list(tmp_path.iterdir())) == (before, [path])


@pytest.mark.parametrize("mode", [0o600, 0o664])
def test_a_file_that_is_replaced_keeps_its_mode(maps: trocar.FeatureMaps, tmp_path: Path, mode: int) -> None:
    path = tmp_path / "features.safetensors"
    path.touch()
    path.chmod(mode)
    maps.save(path)
    assert path.stat().st_mode & 0o777 == mode


def test_a_new_file_has_the_mode_of_any_other_one(maps: trocar.FeatureMaps, tmp_path: Path) -> None:
    path, other = tmp_path / "features.safetensors", tmp_path / "other"
    maps.save(path)
    other.touch()
    assert path.stat().st_mode == other.stat().st_mode


def test_a_file_can_be_saved_by_two_threads_at_once(
    maps: trocar.FeatureMaps, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, both = tmp_path / "features.safetensors", Barrier(2)

    def saved(*arguments: Any, **options: Any) -> None:
        save_file(*arguments, **options)
        both.wait(60)

    monkeypatch.setattr(feature_maps, "save_file", saved)
    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(maps.save, path) for _ in range(2)]:
            done.result(60)
    assert list(tmp_path.iterdir()) == [path]
    assert np.array_equal(load_file(path)["fc"], maps["fc"])


def test_a_folder_that_is_missing_is_told_by_the_files_own_name(
    maps: trocar.FeatureMaps, tmp_path: Path
) -> None:
    path = tmp_path / "missing" / "features.safetensors"
    with pytest.raises(FileNotFoundError) as caught:
        maps.save(path)
    assert caught.value.filename == str(path)


def test_saved_files_have_names_values_and_origin(maps: trocar.FeatureMaps, tmp_path: Path) -> None:
    path = tmp_path / "features.safetensors"
    maps.save(path)
    with safe_open(path, "numpy") as file:
        assert sorted(file.keys()) == sorted(SHAPES)
        for name in SHAPES:
            np.testing.assert_array_equal(file.get_tensor(name), maps[name])
        metadata = file.metadata()
    assert json.loads(metadata["trocar.expansions"])["**"] == ["blocks", "fc"]
    assert json.loads(metadata["trocar.info"])["only"]["shape"] == [9]
    assert metadata["trocar.model_id"] == "resnet18"
    assert json.loads(metadata["trocar.edit_expansions"]) == {"layer*": ["layer1", "layer2"]}
    assert json.loads(metadata["trocar.objective"]) == -2.5


@pytest.mark.parametrize("name", ["layer1.*", "blocks", "fc", None])
def test_pictures_are_written_without_a_display(
    maps: trocar.FeatureMaps, tmp_path: Path, name: str | None
) -> None:
    path = tmp_path / "maps.png"
    figure = maps.plot(name, channels=4, path=path)
    with Image.open(path) as image:
        assert image.format == "PNG"
        assert min(image.size) > 100
    assert figure.axes


def test_a_grid_has_one_picture_per_channel(maps: trocar.FeatureMaps) -> None:
    figure = maps.plot("layer1.*", channels=3)
    drawn = [axes.get_images()[0].get_array() for axes in figure.axes if axes.get_images()]
    assert len(drawn) == 3
    np.testing.assert_array_equal(drawn[2], maps["layer1.*"][0, 2])


def test_what_cannot_be_drawn_is_refused(maps: trocar.FeatureMaps) -> None:
    with pytest.raises(ValueError, match="rank"):
        maps.plot("odd/in[0]")


def test_without_matplotlib_the_extra_is_named(
    maps: trocar.FeatureMaps, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "trocar._result.plot", raising=False)
    monkeypatch.delitem(sys.modules, "trocar._base.figures", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "trocar\[plot\]"'):
        maps.plot("fc")


def test_the_repr_lists_every_map(maps: trocar.FeatureMaps) -> None:
    assert "blocks  (2, 7, 9)  float32  504" in repr(maps)
    assert "statistics only" in repr(maps)
    html = maps._repr_html_()
    table, folded = html.split("</table>", 1)
    assert table.count("<tr>") == 6
    assert "<summary>statistics of only</summary>" in folded
    assert "<td>(2, 7, 9)</td>" in html


def test_it_can_be_pickled(maps: trocar.FeatureMaps) -> None:
    copy = pickle.loads(pickle.dumps(maps))
    np.testing.assert_array_equal(copy["fc"], maps["fc"])
    assert copy.stats["only"].mean == 1.5


def test_a_span_without_places_of_tokens_says_that_the_tokenizer_tells_none() -> None:
    sample = ProcessedSample(2, (1, 2), ("a", "b"), (), (False, False))
    maps = trocar.FeatureMaps(
        {"blocks": np.zeros((1, 2, 3), np.float32)},
        info={"blocks": info("blocks", (1, 2, 3))},
        stats={},
        expansions={},
        timing=trocar.ServerTiming(0.0, 0.1),
        processed=[ProcessedInput((sample,), 2, False, ("input_ids",), "")],
    )
    with pytest.raises(ValueError, match="the tokenizer of this model does not tell"):
        maps.span("blocks", 0, 1)
