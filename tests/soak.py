"""Mixed load for as long as wanted, with a bound on the server's memory.

    python -m tests.soak --minutes 30 --memory-limit-mib 1500

A server in a process of its own gets passes of many forms, streams, gradients, edits, failing and hurried
calls, trainers that step, save, go back and close, uploads, models that are unloaded and loaded, and clients
that are killed. Every answer is compared with the first of its kind. A line a minute; the exit code is 1 when
an answer was wrong, a call failed as it should not, memory went over the limit, or the server did not stop
cleanly.
"""

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import trocar
from tests.support.servers.doomed_clients import doomed_clients
from tests.support.servers.server_processes import ServerProcess, server_processes

FACTORY = {
    "plain": ("tests.support.models.tiny_models:Plain", (3, 64, 64)),
    "tiny": ("tests.support.models.trainable_nets:TinyNet", (3, 6, 6)),
    "other": ("tests.support.models.tiny_models:Plain", (3, 8, 8)),
}
MODELS = {
    name: {"factory": factory, "input_shape": shape, "weights": "random:0", "replicas": 2}
    for name, (factory, shape) in FACTORY.items()
}
WORKERS = 4
CACHE_BYTES = 16 << 20
_EXPECTED = (
    trocar.errors.ServerBusyError,
    trocar.errors.DeadlineExceededError,
    trocar.errors.ModelNotLoadedError,
)
"""What may happen to a right call: too much at once, too little time, a model that is being loaded again."""


@dataclass
class Tally:
    """What happened, of all workers together."""

    done: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    answers: dict[object, bytes] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, question: object, answer: Any) -> None:
        """Compare an answer with the first to the same question."""
        with self.lock:
            if self.answers.setdefault(question, answer.tobytes()) != answer.tobytes():
                self.wrong.append(f"another answer to {question}")


class Worker:
    """One caller: does one thing after the other, chosen by chance."""

    def __init__(self, address: str, number: int, seed: int, tally: Tally) -> None:
        self._client = trocar.connect(
            address, token=f"worker-{number}", timeout_s=30, options=trocar.options(cache=number % 2 == 0)
        )
        self._chance, self._tally = random.Random(seed * 1000 + number), tally
        self._trainer: trocar.training.Trainer | None = None
        self._actions: dict[str, Callable[[], object]] = {
            "extract": self._extract,
            "stream": self._stream,
            "gradients": self._gradients,
            "edited": self._edited,
            "failing": self._failing,
            "hurried": self._hurried,
            "step": self._step,
            "save": self._save,
            "close": self._close,
            "upload": self._upload,
            "reload": self._reload,
        }
        self._weights = [20, 5, 5, 5, 5, 5, 20, 3, 2, 2, 1]

    def act(self) -> None:
        """Do one thing and count it."""
        (name,) = self._chance.choices(list(self._actions), self._weights)
        try:
            self._actions[name]()
        except _EXPECTED as error:
            with self._tally.lock:
                self._tally.refused[type(error).__name__] += 1
        except Exception as error:  # noqa: BLE001 - whatever else happens is what the soak looks for
            with self._tally.lock:
                self._tally.wrong.append(f"{name}: {type(error).__name__}: {error}")
        with self._tally.lock:
            self._tally.done[name] += 1

    def end(self) -> None:
        """Leave nothing behind."""
        self._close()
        self._client.close()

    def _inputs(self, model_id: str) -> tuple[tuple[str, int, int], Any]:
        batch, seed = self._chance.randint(1, 16), self._chance.randrange(4)
        shape = (batch, *FACTORY[model_id][1])
        return (model_id, batch, seed), np.random.default_rng(seed).standard_normal(shape, np.float32)

    def _extract(self) -> None:
        question, inputs = self._inputs(self._chance.choice(sorted(FACTORY)))
        self._tally.check(question, self._client.extract(question[0], inputs, "fc")["fc"])

    def _stream(self) -> None:
        asked = [self._inputs("plain") for _ in range(self._chance.randint(1, 8))]
        with self._client.extract_stream("plain", [inputs for _, inputs in asked], "fc") as results:
            for (question, _), result in zip(asked, results, strict=True):
                self._tally.check(question, result.unwrap()["fc"])

    def _gradients(self) -> None:
        question, inputs = self._inputs("other")
        found = self._client.gradients("other", inputs, of=trocar.logit(1), at="/in")["/in"]
        self._tally.check(("gradient", *question), found)

    def _edited(self) -> None:
        question, inputs = self._inputs("other")
        found = self._client.extract("other", inputs, "fc", edits=trocar.edit("conv", "scale", 0.5))["fc"]
        self._tally.check(("edited", *question), found)

    def _failing(self) -> None:
        _, inputs = self._inputs("other")
        calls: Sequence[tuple[str, Any, str]] = [("none", inputs, "fc"), ("other", inputs, "no.such")]
        calls = [*calls, ("other", inputs[:, :2], "fc"), ("other", inputs, "unused")]
        try:
            self._client.extract(*self._chance.choice(calls))
        except (trocar.NotFoundError, trocar.InvalidRequestError):
            return
        raise AssertionError("a wrong request was answered")

    def _hurried(self) -> None:
        question, inputs = self._inputs("plain")
        timeout_s = self._chance.random() * 0.01 + 1e-4
        self._tally.check(
            question,
            self._client.extract("plain", inputs, "fc", options=trocar.options(timeout_s=timeout_s))["fc"],
        )

    def _step(self) -> None:
        if self._trainer is None:
            self._trainer = self._client.train("tiny", optimizer=trocar.training.sgd(lr=0.01))
        loss = self._trainer.step(self._inputs("tiny")[1][:1].repeat(4, 0), np.arange(4)).loss
        assert loss is not None
        assert np.isfinite(loss)

    def _save(self) -> None:
        if self._trainer is not None:
            self._trainer.save()
            if self._chance.random() < 0.3:
                self._trainer.restore()

    def _close(self) -> None:
        if self._trainer is not None:
            self._trainer.close()
            self._trainer = None

    def _upload(self) -> None:
        _, inputs = self._inputs("tiny")
        stored = self._client.upload_dataset(inputs, targets=np.arange(len(inputs)) % 4)
        self._client.delete_dataset(stored.dataset_id)

    def _reload(self) -> None:
        self._client.unload("other")
        self._client.load("other")


def memory_mib(pid: int) -> float:
    """Return the resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def soak(server: ServerProcess, minutes: float, limit_mib: float, seed: int) -> tuple[Tally, float]:
    """Work until the time is up or something is wrong; returns what happened, and the most memory."""
    tally, stop = Tally(), threading.Event()

    def work(number: int) -> None:
        worker = Worker(server.address, number, seed, tally)
        while not stop.is_set():
            worker.act()
        worker.end()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(WORKERS)]
    end, peak, tick = time.monotonic() + minutes * 60, 0.0, 0
    with doomed_clients(server.address, "plain", (8, 3, 64, 64), "conv") as doomed:
        try:
            for thread in threads:
                thread.start()
            while time.monotonic() < end and not tally.wrong and peak <= limit_mib:
                doomed.run(2, together=2, seed=seed + tick)
                stop.wait(min(1.0, max(0.0, end - time.monotonic())))
                peak, tick = max(peak, memory_mib(server.pid)), tick + 1
                if tick % 60 == 0:
                    print(f"{tally.done.total():,} calls, {memory_mib(server.pid):,.0f} MiB", flush=True)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
    return tally, peak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run and print a summary; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--memory-limit-mib", type=float, default=1500.0, help="of the server's process")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    limits = {"feature_cache_bytes": CACHE_BYTES}
    with tempfile.TemporaryDirectory() as folder, server_processes() as processes:
        server = processes.start(Path(folder) / "data", models=MODELS, limits=limits)
        tally, peak = soak(server, chosen.minutes, chosen.memory_limit_mib, chosen.seed)
        last, code = memory_mib(server.pid), server.terminate()
    calls = ", ".join(f"{name} {count:,}" for name, count in sorted(tally.done.items()))
    print(f"{tally.done.total():,} calls: {calls}")
    print(f"refused as they may be: {dict(tally.refused)}")
    print(f"memory: at most {peak:,.0f} MiB, at the end {last:,.0f} MiB; exit code of the server: {code}")
    for problem in tally.wrong[:10]:
        print(f"WRONG: {problem}")
    is_well = not tally.wrong and peak <= chosen.memory_limit_mib and code == 0
    print("all is well" if is_well else "NOT well")
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
