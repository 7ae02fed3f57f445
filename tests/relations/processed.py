"""Models whose inputs the server prepares: texts, pictures and sound, in every form that may be sent.

| relation | the two ways |
|---|---|
| `alone` | a sample among others, which are padded with it, and by itself |
| `order` | a batch, and the same in another order |
| `forms` | the samples in one form, and in every other, see `Kind.forms` |
| `stream` | with `extract`, and as a batch of a stream |
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import soundfile
from PIL import Image

import trocar
from tests.relations.outcome import Outcome, asked, compare_bits, refused_alike
from tests.relations.replies import Parts, close, parts
from tests.support.models import text_models
from tests.support.models.text_models import CHAT_TEMPLATE, WORDS, save_text_model, save_tokenizer
from tests.support.models.transformers_folders import save_family
from tests.support.servers.running_server import running_server
from trocar._request.surgery import make_surgery
from trocar._wire.requests import extract_call
from trocar_api.v1.extraction_pb2 import ExtractRequest

COUNT = 3
RATE = 16_000
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
Ask = Callable[[Any], trocar.FeatureMaps]


@dataclass(frozen=True)
class Kind:
    """One model, and the samples that it takes.

    Attributes:
        table: Makes its configuration, with its files in a folder.
        sample: Draws one sample.
        forms: Every form of a list of samples as inputs, with equal meaning; the first is the usual one.
        places: What is tapped.
        has_tokens: Whether values of rank 3 are tokens of texts.
    """

    table: Callable[[Path], dict[str, Any]]
    sample: Callable[[Random], Any]
    forms: Mapping[str, Callable[[list[Any], Path], Any]]
    places: tuple[str, ...]
    has_tokens: bool = False


def _bert(folder: Path) -> dict[str, Any]:
    save_text_model(folder)
    save_tokenizer(folder, chat_template=CHAT_TEMPLATE)
    return {"source": f"hf:{folder}"}


def _decoder(family: str, folder: Path) -> dict[str, Any]:
    save_family(family, folder)
    names = ["input_ids", "attention_mask"]
    save_tokenizer(folder, padding_side="left", chat_template=CHAT_TEMPLATE, model_input_names=names)
    return {"source": f"hf:{folder}"}


def _pictures(_: Path) -> dict[str, Any]:
    size: Any = {"resize": [36], "crop": [32, 32]}
    build = {"factory": "tests.relations.families:build", "arguments": ["resnet"]}
    return {**build, "input_shape": (3, 32, 32), "preprocessing": size}


def _sound(folder: Path) -> dict[str, Any]:
    text_models.save_feature_extractor(folder)
    return {"factory": f"{text_models.__name__}:whisper", "input_shape": (8, 100), "processor": folder}


def _text(chance: Random) -> str:
    words = [chance.choice(WORDS[:7]) for _ in range(chance.randint(1, 5))]
    words.insert(chance.randrange(len(words) + 1), "cat")
    return " ".join(words)


def _token_ids(texts: list[Any], _: Path) -> Any:
    known = {word: number for number, word in enumerate([*SPECIAL, *WORDS])}
    return [[known["[CLS]"], *(known[word] for word in text.split()), known["[SEP]"]] for text in texts]


def _chats(pairs: list[Any], _: Path) -> Any:
    return trocar.chat([[{"role": "user", "content": text}] for text in pairs], add_generation_prompt=True)


def _rendered(pairs: list[Any], _: Path) -> Any:
    return trocar.texts([f"user : {text} assistant :" for text in pairs], add_special_tokens=False)


def _files(pictures: list[Any], folder: Path) -> list[Path]:
    paths = [folder / f"{number}.png" for number in range(len(pictures))]
    for path, picture in zip(paths, pictures, strict=True):
        Image.fromarray(picture).save(path)
    return paths


def _encoded(clips: list[Any], folder: Path, kind: str) -> list[Path]:
    paths = [folder / f"{number}.{kind}" for number in range(len(clips))]
    for path, clip in zip(paths, clips, strict=True):
        soundfile.write(path, clip, RATE, subtype="PCM_16")
    return paths


def _clip(chance: Random) -> Any:
    """Draw sound whose samples are exact in 16 bits."""
    random = np.random.default_rng(chance.randrange(10**6))
    return (random.integers(-9000, 9000, chance.randint(2000, 9000)) / 32768).astype(np.float32)


def _picture(chance: Random) -> Any:
    random = np.random.default_rng(chance.randrange(10**6))
    return random.integers(0, 256, (chance.randint(40, 60), chance.randint(40, 60), 3), np.uint8)


_TEXT_FORMS: Mapping[str, Any] = {
    "texts": lambda texts, _: texts,
    "options": lambda texts, _: trocar.texts(texts, max_tokens=16, truncate=True),
    "words": lambda texts, _: [text.split() for text in texts],
    "token ids": _token_ids,
}
_TEXTS = {"sample": _text, "forms": _TEXT_FORMS, "places": ("hidden[0]", "hidden[1]", "hidden[-1]")}
KINDS: dict[str, Kind] = {
    "texts-bert": Kind(_bert, **_TEXTS, has_tokens=True),  # type: ignore[arg-type]
    "texts-llama": Kind(partial(_decoder, "llama"), **_TEXTS, has_tokens=True),  # type: ignore[arg-type]
    "texts-gpt2": Kind(partial(_decoder, "gpt2"), **_TEXTS, has_tokens=True),  # type: ignore[arg-type]
    "chats": Kind(
        _bert,
        _text,
        {"chats": _chats, "rendered": _rendered},
        ("hidden[1]", "hidden[-1]"),
        has_tokens=True,
    ),
    "pairs": Kind(
        _bert,
        lambda chance: (_text(chance), "a dog"),
        {"pairs": lambda pairs, _: pairs, "options": lambda pairs, _: trocar.texts(pairs, max_tokens=16)},
        ("hidden[1]", "hidden[-1]"),
        has_tokens=True,
    ),
    "pictures": Kind(
        _pictures,
        _picture,
        {
            "pixels": lambda pictures, _: pictures,
            "paths": _files,
            "names": lambda pictures, folder: [str(path) for path in _files(pictures, folder)],
            "bytes": lambda pictures, folder: [path.read_bytes() for path in _files(pictures, folder)],
            "PIL": lambda pictures, _: [Image.fromarray(picture) for picture in pictures],
        },
        ("conv1", "layer2.0.bn1", "layer4", "fc"),
    ),
    "sound": Kind(
        _sound,
        _clip,
        {
            "samples": lambda clips, _: trocar.audio(clips, RATE),
            "wav": partial(_encoded, kind="wav"),
            "flac": partial(_encoded, kind="flac"),
        },
        ("model.conv1", "model.layers.0", "model.layers.1"),
    ),
}
"""The models by their ids."""


class ProcessedHosts:
    """A server of these models, and a folder for files."""

    def __init__(self, client: trocar.Client, folder: Path) -> None:
        self.client, self.folder = client, folder


@contextmanager
def hosted_kinds(names: Iterable[str]) -> Iterator[ProcessedHosts]:
    """Host some of them for the length of the context."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory()))
        tables = {}
        for name in names:
            (folder / name).mkdir()
            tables[name] = KINDS[name].table(folder / name)
        server = stack.enter_context(running_server(models=tables, device="cpu"))
        client = stack.enter_context(trocar.connect(server.address, timeout_s=600, retries=0))
        yield ProcessedHosts(client, folder)


def draw_taps(chance: Random, kind: Kind) -> list[trocar.Tap]:
    """Draw taps of values, statistics, pools and spans."""
    taps = []
    for number, place in enumerate(chance.sample(kind.places, min(len(kind.places), 3))):
        options: dict[str, Any] = {"alias": f"tap {number}"}
        choice = chance.randrange(6 if kind.has_tokens else 3)
        if choice == 0:
            options |= {"stats": ["mean", "l2", "count", "max"], "over": "sample", "values": False}
        elif choice == 1 and place != "fc":
            options["reduce"] = trocar.pool(chance.choice(["avg", "max", "gem"]))
        elif choice == 3:
            options["tokens"] = chance.choice(["cls", "last"])
        elif choice == 4:
            start = chance.randrange(3)
            span = chance.choice([trocar.span("cat"), trocar.span("cat"), trocar.span(start, start + 2)])
            options |= {"tokens": span, "stats": ["count", "mean"], "over": "sample"}
        elif choice == 5:
            options |= {"positions": draw_positions(chance), "stats": ["count", "mean"], "over": "sample"}
        taps.append(trocar.tap(place, **options))
    return taps


def draw_positions(chance: Random) -> Any:
    """Draw positions that each of the texts has."""
    some: Any = chance.choice(["all", [0, -1], -2, slice(None, -1), slice(-2, None), slice(0, 9, 2)])
    cat = len(WORDS[: WORDS.index("cat")]) + len(SPECIAL)
    ways: list[dict[str, Any]] = [
        {"prompt": some},
        {"prompt": "all", "but_not": trocar.positions(token_ids=[cat], prompt=[0])},
        {"prompt": [0], "token_ids": cat},
    ]
    return trocar.positions(**chance.choice(ways))


def draw_edits(chance: Random, kind: Kind) -> list[trocar.Edit]:
    """Draw an edit, of a span or of positions of the texts where there are some."""
    if chance.random() < 0.5:
        return []
    options: dict[str, Any] = {"channels": [0, 3]}
    if kind.has_tokens:
        ways = [{"tokens": trocar.span("cat")}, {"positions": draw_positions(chance)}]
        ways.append({"positions": trocar.positions(spans="cat", prompt=[0])})
        options = chance.choice(ways)
    return [trocar.edit(kind.places[0], "scale", 0.5, **options)]


def _asking(hosts: ProcessedHosts, name: str, chance: Random) -> Ask:
    kind = KINDS[name]
    taps, edits = draw_taps(chance, kind), draw_edits(chance, kind)
    return lambda inputs: hosts.client.extract(name, inputs, taps, edits=edits)


def drawn_messages(name: str, chance: Random, folder: Path) -> Iterator[ExtractRequest]:
    """Draw requests in every form, as they are sent."""
    kind = KINDS[name]
    samples = [kind.sample(chance) for _ in range(COUNT)]
    for form in kind.forms.values():
        taps, surgery = draw_taps(chance, kind), make_surgery(draw_edits(chance, kind))
        call = extract_call(name, form(samples, folder), taps, surgery=surgery)
        yield ExtractRequest.FromString(call.head)


def _inputs(hosts: ProcessedHosts, name: str, samples: list[Any], form: str = "") -> Any:
    forms = KINDS[name].forms
    return forms[form or next(iter(forms))](samples, hosts.folder)


def _rows(name: str, maps: trocar.FeatureMaps, sample: int) -> Parts:
    """Return the part of a reply that belongs to a sample, without padding."""
    rows: Parts = {}
    for part, values in parts(maps).items():
        is_text = KINDS[name].has_tokens and part[1] == "values" and values.ndim == 3
        rows[part] = maps.samples(part[0])[sample] if is_text else values[sample]
    return rows


def alone(hosts: ProcessedHosts, name: str, chance: Random) -> Outcome:
    """Compare a sample among others with the same by itself; of texts the shortest, which is padded most."""
    samples = [KINDS[name].sample(chance) for _ in range(COUNT)]
    outcome, ask, chosen = Outcome("alone", name), _asking(hosts, name, chance), chance.randrange(COUNT)
    if KINDS[name].has_tokens:
        chosen = min(range(COUNT), key=lambda number: len(str(samples[number]).split()))
    together = asked(lambda: ask(_inputs(hosts, name, samples)))
    single = asked(lambda: ask(_inputs(hosts, name, samples[chosen : chosen + 1])))
    if not refused_alike(outcome, together, single):
        mine, own = _rows(name, together, chosen), _rows(name, single, 0)  # type: ignore[arg-type]
        for part in mine:
            outcome.comparison.note(part, mine[part], own[part], close(2e-3))
    return outcome


def order(hosts: ProcessedHosts, name: str, chance: Random) -> Outcome:
    """Compare a batch with the same in another order."""
    samples = [KINDS[name].sample(chance) for _ in range(COUNT)]
    outcome, ask, chosen = Outcome("order", name), _asking(hosts, name, chance), [2, 0, 1]
    one = asked(lambda: ask(_inputs(hosts, name, samples)))
    other = asked(lambda: ask(_inputs(hosts, name, [samples[at] for at in chosen])))
    if not refused_alike(outcome, one, other):
        for row, at in enumerate(chosen):
            mine, theirs = _rows(name, one, at), _rows(name, other, row)  # type: ignore[arg-type]
            for part in mine:
                outcome.comparison.note(part, mine[part], theirs[part], close(2e-3))
    return outcome


def forms(hosts: ProcessedHosts, name: str, chance: Random) -> Outcome:
    """Compare every form of the same samples."""
    samples = [KINDS[name].sample(chance) for _ in range(COUNT)]
    outcome, kind = Outcome("forms", name), KINDS[name]
    taps = [tap for tap in draw_taps(chance, kind) if "spans" not in repr(tap)] or [
        trocar.tap(kind.places[0])
    ]
    replies = [
        asked(lambda: hosts.client.extract(name, _inputs(hosts, name, samples, form), taps))  # noqa: B023
        for form in kind.forms
    ]
    if not refused_alike(outcome, *replies):
        for other in replies[1:]:
            compare_bits(outcome.comparison, parts(replies[0]), parts(other))  # type: ignore[arg-type]
    return outcome


def stream(hosts: ProcessedHosts, name: str, chance: Random) -> Outcome:
    """Compare `extract` with the second batch of a stream."""
    kind, outcome = KINDS[name], Outcome("stream", name)
    others, samples = ([kind.sample(chance) for _ in range(COUNT)] for _ in range(2))
    taps, inputs = draw_taps(chance, kind), _inputs(hosts, name, samples)
    one = asked(lambda: hosts.client.extract(name, inputs, taps))

    def streamed() -> Any:
        first = next(iter(kind.forms.values()))(others, hosts.folder)
        with hosts.client.extract_stream(name, [first, inputs], taps) as results:
            return [result.unwrap() for result in results][1]

    other = asked(streamed)
    if not refused_alike(outcome, one, other):
        compare_bits(outcome.comparison, parts(one), parts(other))  # type: ignore[arg-type]
    return outcome


PROCESSED_RELATIONS = {"alone": alone, "order": order, "forms": forms, "stream": stream}
"""The relations by name."""
