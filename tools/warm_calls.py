"""Warm call: the calls, functions and files of ours that it touches, both ends in one process.

    python tools/warm_calls.py            # the counts of an extract and of a training step
    python tools/warm_calls.py --files    # and the files in the order in which they are first entered
    python tools/warm_calls.py --calls    # and the functions, with the calls of each
    python tools/warm_calls.py --json     # the same for programs

A profile hook counts Python calls in `trocar`, `trocar_server` and `trocar_api` while a call is repeated.
Generators and coroutines count each time they are entered or resumed.
"""

import argparse
import json
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
OURS = tuple(
    str(ROOT / folder) + "/" for folder in ("client/trocar", "service/trocar_server", "proto/trocar_api")
)


@dataclass(frozen=True)
class Touched:
    """Functions entered by one call.

    Attributes:
        calls: Entries into Python functions of ours.
        functions: How many different ones.
        files: Their files, in the order in which each was entered first.
        client_calls: The calls of `trocar` among them.
        by_function: Each function as `file:name`, with its calls, in the order of first entry.
    """

    calls: int
    functions: int
    files: tuple[str, ...]
    client_calls: int
    by_function: tuple[tuple[str, int], ...]


class CallCounter:
    """Counts calls on all threads that begin after it was made, while `counted` runs.

    counter = CallCounter()
    client = trocar.connect("local", models="resnet18=random:0")
    touched = counter.counted(lambda: client.extract("resnet18", image, ["layer4"]))
    """

    def __init__(self) -> None:
        self._is_on = False
        self._entered: Counter[CodeType] = Counter()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def counted(self, call: Callable[[], object]) -> Touched:
        """Make a call and return the functions entered."""
        self._entered = Counter()
        self._is_on = True
        try:
            call()
        finally:
            self._is_on = False
        entered = dict(self._entered)
        files = dict.fromkeys(str(Path(code.co_filename).relative_to(ROOT)) for code in entered)
        of_client = sum(count for code, count in entered.items() if code.co_filename.startswith(OURS[0]))
        named = tuple(
            (f"{Path(code.co_filename).relative_to(ROOT)}:{code.co_qualname}", count)
            for code, count in entered.items()
        )
        return Touched(sum(entered.values()), len(entered), tuple(files), of_client, named)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        if self._is_on and event == "call" and frame.f_code.co_filename.startswith(OURS):
            self._entered[frame.f_code] += 1


def warm_calls() -> dict[str, Touched]:
    """Return the functions that a warm `extract` of one tap and a warm training step enter."""
    counter = CallCounter()  # first: the threads of the server begin after it
    import trocar

    image, labels = np.zeros((1, 3, 64, 64), np.float32), [0]
    with trocar.connect("local", models="resnet18=random:0") as client:
        trainer = client.train("resnet18", head=2, trainable=["fc"], optimizer=trocar.training.sgd(lr=0.01))
        calls: dict[str, Callable[[], object]] = {
            "extract": lambda: client.extract("resnet18", image, ["layer4"]),
            "training step": lambda: trainer.step(image, labels),
        }
        return {name: _warm(counter, call) for name, call in calls.items()}


def _warm(counter: CallCounter, call: Callable[[], object]) -> Touched:
    for _ in range(5):
        call()
    # The server's own timers fall into some of them, and on a busy machine into most.
    return min((counter.counted(call) for _ in range(20)), key=lambda touched: touched.calls)


def main() -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description="Count what warm calls touch.")
    parser.add_argument("--files", action="store_true", help="name the files, in order")
    parser.add_argument("--calls", action="store_true", help="name the functions, in order, with their calls")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    counted = warm_calls()
    if given.json:
        print(json.dumps({name: asdict(touched) for name, touched in counted.items()}))
        return
    for name, touched in counted.items():
        print(
            f"{name}: {touched.calls} calls ({touched.client_calls} of the client), "
            f"{touched.functions} functions, {len(touched.files)} files"
        )
        for file in touched.files if given.files else ():
            print(f"  {file}")
        for function, count in touched.by_function if given.calls else ():
            print(f"  {count:4} {function}")


if __name__ == "__main__":
    main()
