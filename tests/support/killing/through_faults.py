"""Callers of a cluster that work through every fault: no call of theirs may fail.

callers = ThroughFaults([...], gateways)
with callers.working():
    ...                                 # something is killed, and replaced
    callers.look()                      # each looks whether what was acknowledged is there
assert callers.wrong == []
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import trocar
from tests.support.killing.moments import Moments
from tests.support.killing.world import Caller
from tests.support.oracles.tiny_training import PlainTrainer, make_trainer, samples

CALL_S = 120.0
"""The deadline of each call, in seconds. A gateway holds calls for a replica that is being started."""
_LOOK_S = 300.0
_TAKEN_OVER_S = 30.0
_PAUSE_S = 0.3
"""Between two pieces of work of a caller: what is killed needs the CPUs to come back."""


class ThroughFaults:
    """Lets callers work, each on a thread.

    Args:
        callers: Some of them call replicas directly, the others through gateways only.
        gateways: Returns the addresses of all gateways: the one of a new node has another address.
    """

    def __init__(self, callers: Sequence[Caller], gateways: Callable[[], str]) -> None:
        self._callers, self._gateways = callers, gateways
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._changed = threading.Condition()
        self._looks = 0
        self._looked: dict[str, int] = dict.fromkeys((caller.name for caller in callers), 0)
        self._ends = threading.Event()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Let them work within the context."""
        threads = [threading.Thread(target=self._run, args=pair) for pair in enumerate(self._callers)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def look(self) -> None:
        """Let each look whether what was acknowledged is there; returns when all have."""
        with self._changed:
            self._looks += 1
            if not self._changed.wait_for(lambda: min(self._looked.values()) >= self._looks, _LOOK_S):
                late = [name for name, looks in self._looked.items() if looks < self._looks]
                self.wrong.append(f"{', '.join(late)}: no answer within {_LOOK_S:g} s")

    def _run(self, index: int, caller: Caller) -> None:
        while not self._ends.is_set():
            address = self._gateways()
            with trocar.connect(
                address, token=caller.name, timeout_s=CALL_S, direct=index % 2 == 0
            ) as client:
                while not self._ends.is_set() and self._gateways() == address:
                    self._turn(caller, client)
                    self._ends.wait(_PAUSE_S)

    def _turn(self, caller: Caller, client: trocar.Client) -> None:
        """Let a caller look, if it shall, or else work."""
        wanted = self._looks
        shall_look = self._looked[caller.name] < wanted
        try:
            if shall_look:
                self._check(caller, client)
            else:
                caller.work(client)
        except Exception as error:  # noqa: BLE001 - whatever happens is a defect, of the cluster or of this
            what = "look" if shall_look else "work"
            at = time.strftime("%H:%M:%S")
            self.wrong.append(f"{at} {caller.name}, {what}: {type(error).__name__}: {error}")
            print(self.wrong[-1], flush=True)
        self.done[caller.name] += 1
        if shall_look:
            with self._changed:
                self._looked[caller.name] = wanted
                self._changed.notify_all()

    def _check(self, caller: Caller, client: trocar.Client) -> None:
        """Let a caller look; lists miss the trainers that are being taken over just now."""
        until = time.monotonic() + _TAKEN_OVER_S
        while True:
            try:
                return caller.check(client)
            except AssertionError:
                if time.monotonic() > until:
                    raise
            self._ends.wait(1.0)


class Counting:
    """Steps of several trainers in turn; each loss is compared with plain torch at once.

    A step that is lost, or applied twice, changes the next loss.

    Args:
        moments: Told of each step.
        count: The number of trainers.
    """

    name = "counted steps"

    def __init__(self, moments: Moments, count: int) -> None:
        self._moments = moments
        self._plain = [PlainTrainer() for _ in range(count)]
        self._ids: list[str] = []
        self._numbers = [0] * count
        self.longest_s = 0.0
        """The longest time of one step, since this was set to 0."""

    def work(self, client: trocar.Client) -> None:
        """Make one step with each trainer."""
        while len(self._ids) < len(self._plain):
            with self._moments.of("create"):
                self._ids.append(make_trainer(client).trainer_id)
        for index, trainer_id in enumerate(self._ids):
            self._step(client, index, trainer_id)

    def check(self, client: trocar.Client) -> None:
        """Compare the numbers of the next steps."""
        found = {info.trainer_id: info.next_number for info in client.trainers()}
        expected = dict(zip(self._ids, self._numbers, strict=False))
        assert found == expected, f"trainers have the next numbers {found}, and not {expected}"

    def _step(self, client: trocar.Client, index: int, trainer_id: str) -> None:
        number = self._numbers[index]
        batch = samples(4, number)
        began = time.monotonic()
        with self._moments.of("step"):
            loss = client.trainer(trainer_id).step(*batch, number=number).loss
        self.longest_s = max(self.longest_s, time.monotonic() - began)
        self._numbers[index] += 1
        expected = self._plain[index].step(batch)
        assert loss == expected, f"step {number} of trainer {index} has the loss {loss}, not {expected}"
