"""What the chart gives Prometheus and Grafana is what deploy/monitoring has."""

from __future__ import annotations

import pytest

from tests.unit.deploy.chart import CHART, documents
from tests.unit.deploy.manifests import Document
from tests.unit.deploy.support import ROOT, load, parse

MONITORING = ROOT / "deploy" / "monitoring"


def _only(kind: str, name: str = "demo-outrider") -> Document:
    (found,) = [
        d for d in documents("monitored") if (d["kind"], d["metadata"]["name"]) == (kind, name)
    ]
    return found


def test_the_rules_are_those_that_promtool_tests() -> None:
    texts = [path.read_text("utf-8") for path in sorted((MONITORING / "rules").glob("*.yml"))]
    written = (CHART / "files" / "rules.yaml").read_text("utf-8")
    assert written == load("prometheus_rule").rule_groups(texts), "run `make generated`"
    groups = [group for text in texts for group in parse(text)[0]["groups"]]
    # Helm leaves the placeholders of Prometheus as they are.
    assert "{{ $labels.instance }}" in written
    assert _only("PrometheusRule")["spec"] == {"groups": groups}


def test_the_board_is_the_one_of_the_repository() -> None:
    board = (MONITORING / "grafana" / "outrider.json").read_bytes()
    assert (CHART / "files" / "outrider.json").read_bytes() == board, "run `make generated`"
    data = _only("ConfigMap", "demo-outrider-board")["data"]
    assert {name: text.rstrip() for name, text in data.items()} == {
        "outrider.json": board.decode().rstrip()
    }


def test_operator_and_sidecar_find_them_by_their_labels() -> None:
    for kind in ("PodMonitor", "PrometheusRule"):
        assert _only(kind)["metadata"]["labels"]["release"] == "kube-prometheus-stack"
    board = _only("ConfigMap", "demo-outrider-board")
    assert board["metadata"]["labels"]["grafana_dashboard"] == "1"
    assert board["metadata"]["labels"]["team"] == "blue"


@pytest.mark.parametrize("kind", ["PodMonitor", "PrometheusRule"])
def test_a_cluster_without_the_operator_gets_nothing_of_it(kind: str) -> None:
    assert kind not in {d["kind"] for d in documents("")}
