"""The dashboard and the alert rules, against the metrics of a server that had one call of each kind."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import numpy as np
import pytest
import yaml
from structlog.testing import capture_logs

import trocar
from tests.support import ROOT
from tests.support.files.markdown import table_rows
from tests.support.files.promql import Asked, asked_metrics, grouping_labels
from tests.support.models.odd_models import Identity
from tests.support.oracles.tiny_training import MODELS as TRAINABLE
from tests.support.oracles.tiny_training import make_trainer, samples
from tests.support.servers.running_server import running_server
from tests.support.servers.scraping import Scrape, scrape
from tests.support.servers.serving import custom
from trocar_server.cluster.replica_metrics import merged

DASHBOARD = ROOT / "deploy" / "grafana" / "trocar.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
PAGE = ROOT / "docs" / "observability.md"
ROWS = np.zeros((2, 3), np.float32)
OF_PROMETHEUS = {"up"}


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for panel in board["panels"]:
        yield panel
        yield from panel.get("panels", ())


def dashboard_expressions() -> list[str]:
    board = json.loads(DASHBOARD.read_text())
    found = [target["expr"] for panel in panels(board) for target in panel.get("targets", ())]
    variables = [entry["definition"] for entry in board["templating"]["list"] if "definition" in entry]
    return [*found, *(text.removeprefix("label_values(").partition(",")[0] for text in variables)]


def alerts() -> list[dict[str, Any]]:
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


EXPRESSIONS = [*dashboard_expressions(), *(rule["expr"] for rule in alerts())]


@pytest.fixture(scope="module")
def scraped() -> Scrape:
    models = {"identity": custom(Identity), **TRAINABLE}
    with (
        capture_logs(),
        running_server(models=models, device="cpu", metrics_port=0) as running,
        trocar.connect(running.address) as client,
    ):
        client.extract("identity", ROWS, taps=["identity"])
        with suppress(trocar.errors.UnknownModelError):
            client.extract("absent", ROWS, taps=["identity"])
        with client.extract_stream("identity", [ROWS], ["identity"]) as stream:
            list(stream)
        client.plan("identity", (2, 3), taps=["identity"])
        make_trainer(client, saved_tensors=trocar.training.save_on_disk(budget_bytes=0, min_bytes=0)).step(
            *samples(4)
        )
        with grpc.insecure_channel(running.address) as channel, suppress(grpc.RpcError):
            absent: Any = channel.unary_unary("/absent.Service/Method")
            absent(b"", timeout=60)
        return scrape(running)


@pytest.fixture(scope="module")
def labels(scraped: Scrape) -> dict[str, set[str]]:
    """The labels of every metric, as on a cluster's page; a GPU's have no samples here, but their name."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for family in Scrape(merged({"identity/0": scraped.text})).families():
        if not family.samples:
            found[family.name] = {"kind"}
        for sample in family.samples:
            found[sample.name] |= set(sample.labels)
    return found


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("up", {Asked("up", frozenset())}),
        (
            'sum by (instance, le) (rate(a_bucket{b="c", d!~"e"}[5m])) / ignoring (x) b_total > 0.9',
            {Asked("a_bucket", frozenset("bd")), Asked("b_total", frozenset())},
        ),
        (
            "histogram_quantile(0.9, rate(a_bucket[$__rate_interval])) or vector(0)",
            {Asked("a_bucket", frozenset())},
        ),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression: str, expected: set[Asked]) -> None:
    assert set(asked_metrics(expression)) == expected


@pytest.mark.parametrize("expression", sorted(set(EXPRESSIONS)))
def test_every_metric_and_label_is_there(expression: str, labels: dict[str, set[str]]) -> None:
    asked = [one for one in asked_metrics(expression) if one.name not in OF_PROMETHEUS]
    known: set[str] = set()
    for metric in asked:
        assert metric.name in labels, f"no server has {metric.name}"
        assert metric.labels <= labels[metric.name]
        known |= labels[metric.name]
    assert grouping_labels(expression) <= known


def test_a_metric_that_is_not_there_would_be_found(labels: dict[str, set[str]]) -> None:
    asked = {one.name for one in asked_metrics("rate(trocar_no_such_thing_total[5m]) / trocar_replicas")}
    assert asked - set(labels) == {"trocar_no_such_thing_total"}


def test_every_alert_says_what_it_is_about() -> None:
    rules = alerts()
    assert len({rule["alert"] for rule in rules}) == len(rules)
    for rule in rules:
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}


def test_the_rules_are_those_that_prometheus_loads() -> None:
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert config["rule_files"] == [ALERTS.name]
    assert [job["job_name"] for job in config["scrape_configs"]] == ["trocar"]
    assert {job for rule in alerts() for job in _jobs(rule["expr"])} <= {"trocar"}


def _jobs(expression: str) -> list[str]:
    return [part.partition('"')[0] for part in expression.split('job="')[1:]]


def test_panels_have_ids_titles_and_places_of_their_own() -> None:
    board = json.loads(DASHBOARD.read_text())
    found = list(panels(board))
    assert len({panel["id"] for panel in found}) == len(found)
    cells: set[tuple[int, int]] = set()
    for panel in found:
        assert panel["title"]
        place = panel["gridPos"]
        own = {(place["x"] + dx, place["y"] + dy) for dx in range(place["w"]) for dy in range(place["h"])}
        assert not own & cells
        assert place["x"] + place["w"] <= 24
        cells |= own


def test_every_metric_of_ours_is_explained(scraped: Scrape) -> None:
    explained = {row[0].strip("`") for row in table_rows(PAGE)}
    families = {family.name: family.type for family in scraped.families()}
    own = {
        name + "_total" * (kind == "counter")
        for name, kind in families.items()
        if name.startswith(("trocar_", "grpc_"))
    }
    assert own - explained == set()
    assert {name for name in explained if name.startswith(("trocar_", "grpc_"))} - own == set()


def test_every_alert_is_explained() -> None:
    explained = {row[0].strip("`") for row in table_rows(PAGE)}
    assert {rule["alert"] for rule in alerts()} <= explained
