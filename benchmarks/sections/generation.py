"""Generated tokens a second, and the first one, against `transformers.generate` in this process, in one run.

Llamas of random parameters, 64 tokens of prompt and 64 generated ones, greedy. With values, every block is
tapped: with hooks that copy to NumPy there, streamed to the client here. The last row of each table is an
extract of one token while eight callers generate: what it waits longer than alone, in steps of a text.
"""

import statistics
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

import trocar
from benchmarks.measuring import Effort, in_turns, timed
from benchmarks.report import Figure, Row, Table
from benchmarks.served import served

_ROUNDS, _EXTRACTS, _CALLERS = 12, 40, 8
_PROMPT, _COUNT = list(range(5, 69)), 64
COLUMNS = ("tokens/s", "of transformers", "steps")


@dataclass(frozen=True)
class Size:
    """One model."""

    millions: int
    """Of parameters."""
    config: dict[str, Any]
    """What differs from others."""

    @property
    def blocks(self) -> list[str]:
        """Selectors of its blocks."""
        return [f"model.layers.{index}" for index in range(self.config["num_hidden_layers"])]

    def make(self) -> Any:
        """Return it, with random weights."""
        torch.manual_seed(0)
        ids = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "max_position_embeddings": 1024}
        settings: dict[str, Any] = {**self.config, **ids}
        config: Any = transformers.LlamaConfig(**settings)
        model: Any = transformers.LlamaForCausalLM(config)
        return model.eval().requires_grad_(False)


_SIZES = (
    Size(
        27,
        {
            "vocab_size": 8000,
            "hidden_size": 512,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "intermediate_size": 1376,
        },
    ),
    Size(
        110,
        {
            "vocab_size": 16000,
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "num_attention_heads": 12,
            "intermediate_size": 2048,
        },
    ),
)


def run(effort: Effort) -> list[Table]:
    """Measure all rows."""
    return [_table(size, effort) for size in _SIZES]


def _table(size: Size, effort: Effort) -> Table:
    model = size.make()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "llama"
        model.save_pretrained(folder)
        with (
            served([f"llama=hf:{folder}"]) as server,
            trocar.connect(server.address, timeout_s=600) as client,
        ):
            rows = _against_transformers(size, model, client, effort.of(_ROUNDS))
            rows.append(_beside_texts(server.address, effort.of(_EXTRACTS)))
    return Table(f"Generated text, {size.millions} million parameters", rows, COLUMNS)


def _against_transformers(size: Size, model: Any, client: trocar.Client, rounds: int) -> list[Row]:
    prompt = np.array([_PROMPT])

    def ours(count: int, *taps: str) -> None:
        client.generate("llama", prompt, max_new_tokens=count, stop_token_ids=[], taps=taps).finish()

    ways: dict[str, tuple[int, Callable[[], None], Callable[[], None], float]] = {
        "tokens": (_COUNT, partial(ours, _COUNT), partial(_generate, model, _COUNT), 0.95),
        "tokens, values of every block": (
            _COUNT,
            partial(ours, _COUNT, *size.blocks),
            partial(_hooked, model, _COUNT),
            0.9,
        ),
        "the first token": (1, partial(ours, 1), partial(_generate, model, 1), 1 / 1.1),
    }
    rows = []
    for name, (count, own, other, target) in ways.items():
        result = in_turns({"own": partial(timed, own), "other": partial(timed, other)}, rounds)
        took, of_other = (statistics.median(result[key]) for key in ("own", "other"))
        figures = (Figure(count / took), Figure(of_other / took, target, higher_is_better=True))
        rows.append(Row(name, dict(zip(COLUMNS, figures, strict=False))))
    return rows


def _beside_texts(address: str, repeats: int) -> Row:
    """Return what an extract waits while eight callers generate."""
    prompt, one = np.array([_PROMPT]), np.array([_PROMPT[:1]])
    with trocar.connect(address, token="one caller", timeout_s=600) as client:

        def extract() -> None:
            client.extract("llama", {"input_ids": one}, "model.norm")

        def text() -> None:
            client.generate("llama", prompt, max_new_tokens=_COUNT, stop_token_ids=[]).finish()

        extract()
        alone = statistics.median(timed(extract, repeats))
        step = statistics.median(timed(text, 3)) / _COUNT
        with _texts(address):
            beside = statistics.median(timed(extract, repeats))
    return Row("an extract beside eight texts", {COLUMNS[2]: Figure((beside - alone) / step, 1.0)})


@contextmanager
def _texts(address: str) -> Iterator[None]:
    """Have eight callers generate one text after the other."""
    ended, begun = threading.Event(), threading.Barrier(_CALLERS + 1)

    def generate(number: int) -> None:
        with trocar.connect(address, token=f"caller {number}", timeout_s=600) as client:
            run = client.generate("llama", np.array([_PROMPT]), max_new_tokens=900, stop_token_ids=[])
            for index, _ in enumerate(run):
                if index == 0:
                    begun.wait()
                if ended.is_set():
                    run.close()
                    break

    def generate_or_tell(number: int) -> None:
        try:
            generate(number)
        except BaseException:
            begun.abort()
            raise

    threads = [threading.Thread(target=generate_or_tell, args=(number,)) for number in range(_CALLERS)]
    for thread in threads:
        thread.start()
    begun.wait()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _generate(model: Any, count: int) -> None:
    given = torch.tensor([_PROMPT])
    with torch.inference_mode():
        model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )


def _hooked(model: Any, count: int) -> None:
    seen: list[Any] = []

    def note(_: Any, __: Any, output: Any) -> None:
        seen.append((output[0] if isinstance(output, tuple) else output).clone().numpy())

    handles = [block.register_forward_hook(note) for block in model.model.layers]
    try:
        _generate(model, count)
    finally:
        for handle in handles:
            handle.remove()
