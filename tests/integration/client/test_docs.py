"""What the guide pages say, done: code runs against a real server, commands and settings exist.

A `python` block of a page runs after those above it. A `text` block right below one is what it prints.
A line that ends in `# -> value` has that value. `...` stands for anything in both.
"""

import ast
import contextlib
import doctest
import io
import re
import shlex
import shutil
from collections.abc import Iterator
from importlib.metadata import entry_points, metadata
from pathlib import Path
from typing import Any

import pytest
import typer
from PIL import Image
from structlog.testing import capture_logs

from tests.support import ROOT
from tests.support.files.command_lines import parse
from tests.support.files.markdown import Block, blocks, links, table_rows
from tests.support.models import causal_models, text_models
from tests.support.servers.running_server import RunningServer, running_server
from trocar import ErrorReason
from trocar._cli.app import build_app
from trocar._cli.demo.demo_sources import find_sources
from trocar._cli.plugins import GROUP, plugin_app
from trocar._request.taps import STATISTICS
from trocar.errors import EXCEPTIONS
from trocar_server.app.specs import model_spec
from trocar_server.config import (
    EngineConfig,
    Limits,
    ModelConfig,
    PreprocessingConfig,
    ServerConfig,
    read_config,
)

GUIDES = sorted([*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "tasks").glob("*.md")])
PAGES = [ROOT / "README.md", *GUIDES]
CHECKED = [page for page in PAGES if page.name != "performance.md"]
ADDRESS = "localhost:50051"
FILES = (".npy", ".pth", ".toml", ".pem", ".jpg", ".png", ".json")
"""What the commands of the pages are given; such files are made before."""

MODELS = {
    "resnet50": ModelConfig(weights="random:0", categories="torchvision:resnet50"),
    "vit_b_16": ModelConfig(weights="random:0"),
    "fcn_resnet50": ModelConfig(weights="random:0", options={"aux_loss": True}),  # as with its own weights
    "minilm": ModelConfig(source=f"hf:{text_models.minilm_folder()}"),
    "small": ModelConfig(source="timm:resnet10t", weights="random:0"),
    "tiny": ModelConfig(source="timm:vit_tiny_patch16_224", weights="random:0"),
}

pages = pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.name)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    whisper = text_models.save_whisper(tmp_path_factory.mktemp("whisper"))
    llama = tmp_path_factory.mktemp("llama")
    causal_models.save_causal("llama", llama)
    gpt2 = tmp_path_factory.mktemp("gpt2")
    causal_models.save_causal("gpt2", gpt2)
    deeper = {"n_layer": 8}  # the pages name its layer 6
    models = {
        **MODELS,
        "gpt2": ModelConfig(source=f"hf:{gpt2}", weights="random:0", options=deeper),
        "whisper": ModelConfig(source=f"hf:{whisper}"),
        "llama": ModelConfig(source=f"hf:{llama}"),
    }
    patient = {"max_processing_s": 300}  # the start of a tokenizer or feature extractor, on a busy machine
    with capture_logs(), running_server(models=models, limits=patient) as running:  # no log in our stdout
        yield running


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory that pages assume: two photographs, a folder of them, and one by classes."""
    cat, cup = find_sources().photographs
    for name in ("photos", "pets/cat", "pets/cup"):
        (tmp_path / name).mkdir(parents=True)
    for name in ("cat.jpg", "photos/a.jpg", "photos/b.jpg", "pets/cat/1.jpg", "pets/cat/2.jpg"):
        Image.open(cat).convert("RGB").save(tmp_path / name)
    for name in ("pets/cup/1.jpg", "pets/cup/2.jpg"):
        Image.open(cup).convert("RGB").save(tmp_path / name)
    shutil.copy(cup, tmp_path / "cup.png")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def following(page: Path) -> Iterator[tuple[Block, Block | None]]:
    """Yield each block with the one after it."""
    found = blocks(page)
    yield from zip(found, [*found[1:], None], strict=False)


def run_block(block: Block, page: Path, namespace: dict[str, Any], address: str) -> str:
    """Run a block, check the values that it shows, and return what it prints."""
    source = block.text.replace(ADDRESS, address)
    if match := re.match(r"# (\w+\.py)\n", source):
        Path(match[1]).write_text(source)
    lines = source.splitlines()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for node in ast.parse("\n" * (block.line - 1) + source).body:
            code = ast.unparse(node)
            shown = re.search(r"# -> (.*)$", lines[node.end_lineno - block.line]) if node.end_lineno else None
            if isinstance(node, ast.Expr) and shown:
                check_output(repr(eval(code, namespace)), shown[1], f"{page.name}:{node.lineno}")
            else:
                exec(compile(ast.Module([node], []), f"{page.name}:{node.lineno}", "exec"), namespace)
    return printed.getvalue()


def check_output(found: str, shown: str, where: str) -> None:
    checker, options = doctest.OutputChecker(), doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    if not checker.check_output(shown.strip() + "\n", found.strip() + "\n", options):
        pytest.fail(f"{where} shows\n{shown}\nbut it is\n{found}")


@pages
def test_code_of_the_page_runs(page: Path, server: RunningServer, folder: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block, after in following(page):
        if block.language != "python":
            continue
        found = run_block(block, page, namespace, server.address)
        if after is not None and after.language == "text":
            check_output(found, after.text, f"{page.name}:{after.line}")


def shell_commands(page: Path) -> list[list[str]]:
    """Return the words of every `trocar` command in the shell blocks of a page."""
    found = []
    for block in blocks(page):
        if block.language not in ("sh", "console"):
            continue
        for line in block.text.replace("\\\n", " ").splitlines():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            if words and words[0] == "trocar":
                end = next((i for i, word in enumerate(words) if word in ("|", ">", "&")), None)
                found.append(words[1:end])
    return found


def expand(word: str, folder: Path) -> list[str]:
    """Do what a shell does with a star: take the files that match, or else the word itself."""
    return (sorted(map(str, folder.glob(word))) if "*" in word else []) or [word]


@pages
def test_commands_of_the_page_exist_with_their_options(page: Path, folder: Path) -> None:
    for command in shell_commands(page):
        words = [name for word in command for name in expand(word, folder)]
        for word in words:
            if Path(word).suffix in FILES and "=" not in word:
                Path(word).touch()
        parse(words)


@pages
def test_settings_of_the_page_are_accepted(page: Path, folder: Path) -> None:
    for block in blocks(page):
        if block.language == "toml":
            Path("server.toml").write_text(block.text)
            config = read_config(Path("server.toml"))
            for model_id, model in config.models.items():
                model_spec(model_id, model)


@pages
def test_links_of_the_page_lead_somewhere(page: Path) -> None:
    local = [link for link in links(page) if "://" not in link]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pages
def test_extras_of_the_page_exist(page: Path) -> None:
    named = set(re.findall(r"trocar\[(\w+)\]", page.read_text(encoding="utf-8")))
    assert named <= set(metadata("trocar").get_all("Provides-Extra", []))


def test_the_first_pages_lead_to_every_page() -> None:
    pages = [ROOT / "README.md", ROOT / "docs" / "index.md"]
    found = {(page.parent / link).resolve() for page in pages for link in links(page) if "://" not in link}
    assert set(GUIDES) <= found | {pages[1]}


def test_the_readme_is_one_screen() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 55


def test_readme_shows_what_the_demo_prints_in_a_picture_of_sensible_size() -> None:
    picture = ROOT / "docs" / "images" / "demo.png"
    assert "docs/images/demo.png" in links(ROOT / "README.md")
    assert picture.stat().st_size <= 400_000


def test_every_reason_is_explained_with_its_exception() -> None:
    rows = {row[0].strip("`"): row for row in table_rows(ROOT / "docs" / "extracting.md")}
    for reason in ErrorReason:
        assert rows[reason][1] == f"`{EXCEPTIONS[reason].__name__}`"


def test_every_statistic_is_explained() -> None:
    rows = {row[0].strip("`") for row in table_rows(ROOT / "docs" / "extracting.md")}
    assert set(STATISTICS) <= rows


@pytest.mark.parametrize("kind", [ServerConfig, EngineConfig, Limits, ModelConfig, PreprocessingConfig])
def test_every_setting_is_explained(kind: Any) -> None:
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    assert [name for name in kind.model_fields if f"`{name}`" not in page] == []


def test_every_command_and_option_is_explained() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    root: Any = typer.main.get_command(build_app())
    commands = dict(root.commands)
    for entry in entry_points(group=GROUP):
        name = f"admin {entry.name}" if entry.name in commands["admin"].commands else entry.name
        commands[name] = typer.main.get_command(plugin_app(entry))
    for name, command in commands.items():
        assert f"## trocar {name}" in page
        of_group = getattr(command, "commands", {})
        assert [inner for inner in of_group if f"trocar {name} {inner}" not in page] == []
        parameters = [p for one in (command, *of_group.values()) for p in one.params]
        options = [option for parameter in parameters for option in parameter.opts if option.startswith("--")]
        assert [option for option in options if f"`{option}" not in page] == []
