"""Random histories over the whole API, two callers at once, against what must hold, kept in plain Python.

Models come and go, edits and data sets are stored and deleted, trainers step, save, go back, are published
and closed, passes run one by one and in streams, with and without a feature cache. After every call: what
each caller sees is what he made, values are those of plain torch, and nothing of any call is left in the
server.
"""

from __future__ import annotations

import copy
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import trocar
from tests.support.files.scale import count
from tests.support.models.tiny_models import Plain
from tests.support.models.trainable_nets import SHAPE, TinyNet
from tests.support.oracles.oracle import noise
from tests.support.oracles.tiny_training import MODELS, PlainTrainer, make_trainer, samples
from tests.support.servers.footprint import hook_counts
from tests.support.servers.running_server import RunningServer, running_server
from tests.support.servers.serving import custom, rebuilt

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.oracles.oracle import Array

HISTORIES = count(6)
STEPS = 40
CALLERS = ("alice", "bob")
BASES = {"plain": (Plain, (3, 8, 8)), "tiny": (TinyNet, SHAPE)}
CACHE_BYTES = 100_000
PROBE = samples(3, seed=99)[0]
NOTHING = "0" * 32

callers = st.sampled_from(CALLERS)
bases = st.sampled_from(sorted(BASES))
numbers = st.integers(0, 3)
names = st.sampled_from(["one", "two"])


def forward(model: torch.nn.Module, inputs: Array) -> Array:
    """Return what plain torch makes of a batch."""
    was_training = model.training
    with torch.inference_mode():
        values: Array = model.eval()(torch.from_numpy(inputs)).numpy()
    model.train(was_training)
    return values


def scaled_forward(factor: float, inputs: Array) -> Array:
    """Return the plain net's output with its first convolution's value scaled."""
    model = rebuilt(Plain)
    model.conv.register_forward_hook(lambda _module, _inputs, output: output * factor)
    return forward(model, inputs)


@dataclass
class Made:
    """A trainer and the same steps in plain torch."""

    trainer: trocar.training.Trainer
    plain: PlainTrainer
    saved: dict[int, PlainTrainer] = field(default_factory=dict)


@dataclass
class Belongings:
    """What one caller has made."""

    edits: dict[tuple[str, str], float] = field(default_factory=dict)
    trainers: list[Made] = field(default_factory=list)
    datasets: dict[str, int] = field(default_factory=dict)


class Server(RuleBasedStateMachine):
    """One history."""

    server: ClassVar[RunningServer]
    clients: ClassVar[dict[str, trocar.Client]]
    weights: ClassVar[dict[str, dict[str, torch.Tensor]]]
    published_ever: ClassVar[int] = 0

    @initialize()
    def begin(self) -> None:
        self.clean()  # whatever a history that failed has left
        self.loaded = dict.fromkeys(BASES, True)
        self.published: dict[str, tuple[str, Array]] = {}
        self.has = {name: Belongings() for name in CALLERS}
        for base in BASES:
            self.clients["alice"].load(base)

    def clean(self) -> None:
        """Remove what both callers have, and check that it is gone."""
        for client in self.clients.values():
            for info in client.trainers():
                client.trainer(info.trainer_id).close()
            for stored in client.stored_edits():
                client.delete_edits(stored.model_id, stored.name)
            for dataset in client.datasets():
                client.delete_dataset(dataset.dataset_id)
            for model in client.models():
                if model.model_id not in BASES:
                    with suppress(trocar.errors.UnknownModelError):  # the other's
                        client.unpublish(model.model_id)
            assert [*client.trainers(), *client.stored_edits(), *client.datasets()] == []

    # Models ----------------------------------------------------------------------------------------

    @rule(caller=callers, model_id=bases)
    def load(self, caller: str, model_id: str) -> None:
        self.clients[caller].load(model_id)
        self.loaded[model_id] = True

    @rule(caller=callers, model_id=bases, often=st.integers(0, 3))
    def unload(self, caller: str, model_id: str, often: int) -> None:
        if often == 0:
            self.clients[caller].unload(model_id)
            self.loaded[model_id] = False

    # Passes ----------------------------------------------------------------------------------------

    @rule(caller=callers, model_id=bases, seed=numbers, cache=st.sampled_from([None, True, False]))
    def extract(self, caller: str, model_id: str, seed: int, cache: bool | None) -> None:
        kind, shape = BASES[model_id]
        inputs = noise(2, *shape, seed=seed)

        def call() -> trocar.FeatureMaps:
            return self.clients[caller].extract(
                model_id, inputs, taps="fc", options=trocar.options(cache=cache)
            )

        if not self.loaded[model_id]:
            with pytest.raises(trocar.errors.ModelNotLoadedError):
                call()
            return
        maps = call()
        assert not (cache is False and maps.is_cached)
        np.testing.assert_array_equal(maps["fc"], forward(rebuilt(kind), inputs))

    @rule(caller=callers, seeds=st.lists(numbers, min_size=1, max_size=5))
    def stream(self, caller: str, seeds: list[int]) -> None:
        if not self.loaded["plain"]:
            return
        inputs = [noise(1 + seed, 3, 8, 8, seed=seed) for seed in seeds]
        with self.clients[caller].extract_stream("plain", inputs, taps="fc") as results:
            found = [result.unwrap()["fc"] for result in results]
        assert len(found) == len(inputs)
        for value, given in zip(found, inputs, strict=True):
            np.testing.assert_array_equal(value, forward(rebuilt(Plain), given))

    @rule(caller=callers, seed=numbers)
    def gradient(self, caller: str, seed: int) -> None:
        if not self.loaded["plain"]:
            return
        inputs = noise(2, 3, 8, 8, seed=seed)
        found = self.clients[caller].gradients("plain", inputs, of=trocar.logit(1), at="/in")
        leaf = torch.from_numpy(inputs).requires_grad_()
        rebuilt(Plain)(leaf)[:, 1].sum().backward()
        assert leaf.grad is not None
        np.testing.assert_allclose(found["/in"], leaf.grad.numpy(), rtol=1e-5, atol=1e-7)

    @rule(caller=callers, problem=st.integers(0, 4))
    def failing(self, caller: str, problem: int) -> None:
        inputs: Any = noise(2, 3, 8, 8)
        calls = [("plain", inputs, "no.such"), ("none", inputs, "fc"), ("plain", inputs[:, :2], "fc")]
        calls += [(NOTHING, inputs, "fc"), ("plain", inputs, "unused")]
        with pytest.raises(trocar.TrocarError) as caught:
            self.clients[caller].extract(*calls[problem])
        assert caught.value.reason not in (None, "INTERNAL")

    # Stored edits ----------------------------------------------------------------------------------

    @rule(caller=callers, name=names, factor=st.sampled_from([0.0, 0.5, 2.0]), replace=st.booleans())
    def store(self, caller: str, name: str, factor: float, replace: bool) -> None:
        def call() -> object:
            change = trocar.edit("conv", "scale", factor)
            return self.clients[caller].store_edits("plain", name, change, replace=replace)

        mine = self.has[caller].edits
        if not self.loaded["plain"]:
            with pytest.raises(trocar.errors.ModelNotLoadedError):
                call()
        elif ("plain", name) in mine and not replace:
            with pytest.raises(trocar.errors.EditsExistError):
                call()
        else:
            call()
            mine["plain", name] = factor

    @rule(caller=callers, name=names)
    def delete_edits(self, caller: str, name: str) -> None:
        if self.has[caller].edits.pop(("plain", name), None) is None:
            with pytest.raises(trocar.errors.UnknownEditsError):
                self.clients[caller].delete_edits("plain", name)
        else:
            self.clients[caller].delete_edits("plain", name)

    @rule(caller=callers, name=names, seed=numbers)
    def extract_edited(self, caller: str, name: str, seed: int) -> None:
        if not self.loaded["plain"]:
            return
        inputs, factor = noise(2, 3, 8, 8, seed=seed), self.has[caller].edits.get(("plain", name))
        if factor is None:
            with pytest.raises(trocar.errors.UnknownEditsError):
                self.clients[caller].extract("plain", inputs, taps="fc", edits=name)
            return
        found = self.clients[caller].extract("plain", inputs, taps="fc", edits=name)["fc"]
        np.testing.assert_array_equal(found, scaled_forward(factor, inputs))

    # Trainers --------------------------------------------------------------------------------------

    @rule(caller=callers)
    def create(self, caller: str) -> None:
        if not self.loaded["tiny"]:
            with pytest.raises(trocar.errors.ModelNotLoadedError):
                make_trainer(self.clients[caller])
        elif len(self.has[caller].trainers) < 2:
            self.has[caller].trainers.append(Made(make_trainer(self.clients[caller]), PlainTrainer()))

    def pick(self, caller: str, number: int) -> Made | None:
        trainers = self.has[caller].trainers
        return trainers[number % len(trainers)] if trainers else None

    @rule(caller=callers, number=numbers, seed=numbers)
    def step(self, caller: str, number: int, seed: int) -> None:
        if made := self.pick(caller, number):
            batch = samples(4, seed)
            assert made.trainer.step(*batch).loss == pytest.approx(made.plain.step(batch), rel=1e-6)

    @rule(caller=callers, number=numbers)
    def save(self, caller: str, number: int) -> None:
        made = self.pick(caller, number)
        if made and len(made.saved) < 4:
            made.saved[made.trainer.save().number] = copy.deepcopy(made.plain)

    @rule(caller=callers, number=numbers, which=numbers)
    def restore(self, caller: str, number: int, which: int) -> None:
        made = self.pick(caller, number)
        if made is None:
            return
        if not made.saved:
            with pytest.raises(trocar.errors.UnknownCheckpointError):
                made.trainer.restore()
            return
        chosen = sorted(made.saved)[which % len(made.saved)]
        made.trainer.restore(chosen)
        made.plain = copy.deepcopy(made.saved[chosen])

    @rule(caller=callers, number=numbers)
    def extract_trainer(self, caller: str, number: int) -> None:
        if made := self.pick(caller, number):
            maps = made.trainer.extract(PROBE, "fc")
            assert not maps.is_cached
            np.testing.assert_array_equal(maps["fc"], forward(made.plain.model, PROBE))

    @rule(caller=callers, number=numbers)
    def close(self, caller: str, number: int) -> None:
        if made := self.pick(caller, number):
            made.trainer.close()
            self.has[caller].trainers.remove(made)
            with pytest.raises(trocar.errors.UnknownTrainerError):
                made.trainer.info()

    @rule(caller=callers, number=numbers)
    def publish(self, caller: str, number: int) -> None:
        made = self.pick(caller, number)
        if made is None or len(self.published) >= 2:
            return
        type(self).published_ever += 1
        model_id = f"published-{self.published_ever}"
        assert made.trainer.publish(model_id) == model_id
        self.published[model_id] = caller, forward(made.plain.model, PROBE)

    @precondition(lambda self: self.published)
    @rule(caller=callers, number=numbers, is_last=st.booleans())
    def published_model(self, caller: str, number: int, is_last: bool) -> None:
        model_id = sorted(self.published)[number % len(self.published)]
        owner, expected = self.published[model_id]
        found = self.clients[caller].extract(model_id, PROBE, taps="fc")["fc"]
        np.testing.assert_array_equal(found, expected)
        if is_last and caller != owner:
            with pytest.raises(trocar.errors.UnknownModelError):
                self.clients[caller].unpublish(model_id)
        elif is_last:
            self.clients[caller].unpublish(model_id)
            del self.published[model_id]
            with pytest.raises(trocar.errors.UnknownModelError):
                self.clients[caller].extract(model_id, PROBE, taps="fc")

    @rule(number=numbers, action=st.sampled_from(["info", "step", "save", "extract", "publish"]))
    def reach_for_anothers(self, number: int, action: str) -> None:
        made = self.pick("alice", number)
        if made is None:
            return
        stolen = trocar.training.Trainer(self.clients["bob"], made.trainer.trainer_id)
        calls: dict[str, Callable[[], object]] = {
            "info": stolen.info,
            "step": lambda: stolen.step(*samples(4), number=0),
            "save": stolen.save,
            "extract": lambda: stolen.extract(PROBE, "fc"),
            "publish": lambda: stolen.publish("stolen"),
        }
        with pytest.raises(trocar.NotFoundError):
            calls[action]()

    # Data sets -------------------------------------------------------------------------------------

    @rule(caller=callers, size=st.integers(1, 6))
    def upload(self, caller: str, size: int) -> None:
        if len(self.has[caller].datasets) < 3:
            images, labels = samples(size, seed=size)
            stored = self.clients[caller].upload_dataset(images, targets=labels, name=f"of {size}")
            self.has[caller].datasets[stored.dataset_id] = size

    @rule(caller=callers, number=numbers)
    def delete_dataset(self, caller: str, number: int) -> None:
        mine = self.has[caller].datasets
        if mine:
            dataset_id = sorted(mine)[number % len(mine)]
            self.clients[caller].delete_dataset(dataset_id)
            del mine[dataset_id]

    @rule()
    def reach_for_anothers_data(self) -> None:
        for dataset_id in set(self.has["alice"].datasets) - set(self.has["bob"].datasets):
            with pytest.raises(trocar.errors.UnknownDatasetError):
                self.clients["bob"].dataset(dataset_id)

    # What must hold after every call ---------------------------------------------------------------

    @invariant()
    def each_sees_his_own(self) -> None:
        for name, client in self.clients.items() if hasattr(self, "has") else ():
            mine = self.has[name]
            assert {info.trainer_id for info in client.trainers()} == {
                made.trainer.trainer_id for made in mine.trainers
            }
            assert {(e.model_id, e.name) for e in client.stored_edits()} == set(mine.edits)
            assert {d.dataset_id: d.sample_count for d in client.datasets()} == mine.datasets
            states = {model.model_id: model.state for model in client.models()}
            assert states.keys() == {*BASES, *self.published}
            assert {name: states[name] == "loaded" for name in BASES} == self.loaded

    @invariant()
    def nothing_is_left(self) -> None:
        engine = self.server.engine
        assert {deployment.pool.leased_count for deployment in engine.deployments.values()} <= {0}
        assert all(set(counts) == {0} for counts in hook_counts(self.server).values())
        assert engine.replies.byte_count <= CACHE_BYTES

    @invariant()
    def base_weights_are_as_they_were(self) -> None:
        for name in BASES:
            engine = self.server.engine
            state = engine.deployment(name).hosted.module.state_dict() if name in engine.deployments else {}
            assert all(torch.equal(value, self.weights[name][key]) for key, value in state.items())


@pytest.fixture(autouse=True, scope="module")
def _running() -> Any:
    models = {**MODELS, "plain": custom(Plain, (3, 8, 8), replicas=2)}
    limits = {"feature_cache_bytes": CACHE_BYTES}
    with ExitStack() as contexts:
        folder = contexts.enter_context(TemporaryDirectory())
        Server.server = contexts.enter_context(
            running_server(models=models, device="cpu", limits=limits, data_dir=folder)
        )
        address = Server.server.address
        Server.clients = {
            name: contexts.enter_context(trocar.connect(address, token=name)) for name in CALLERS
        }
        Server.weights = {name: rebuilt(kind).state_dict() for name, (kind, _) in BASES.items()}
        yield


TestHistories = Server.TestCase
TestHistories.settings = settings(
    max_examples=HISTORIES,
    stateful_step_count=STEPS,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
