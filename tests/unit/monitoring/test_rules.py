"""Rules, alerts and board: they name what is exported, and each alert fires when it should."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.unit.monitoring.expressions import metric_names, ready_for_prometheus, selectors
from tests.unit.monitoring.families import sample_names

ROOT = Path(__file__).parents[3]
MONITORING = ROOT / "deploy" / "monitoring"
RULES = sorted((MONITORING / "rules").glob("*.yml"))
TESTS = sorted((MONITORING / "tests").glob("*.yml"))
BOARD = json.loads((MONITORING / "grafana" / "outrider.json").read_text())
DOCS = '{{ or $externalLabels.outrider_docs "https://docs.outrider.internal" }}'
"""Address of the documentation, which an external label of Prometheus sets."""
OF_PROMETHEUS = {"up", "ALERTS"}
promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="there is no promtool here")


def rules() -> list[dict[str, Any]]:
    files = [yaml.safe_load(file.read_text()) for file in RULES]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


ALERTS = [rule for rule in rules() if "alert" in rule]
RECORDED = {rule["record"] for rule in rules() if "record" in rule}
TARGETS = [
    (panel["title"], target["expr"])
    for panel in BOARD["panels"]
    for target in panel.get("targets", [])
]


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("a_total", {"a_total"}),
        (
            'sum by (job, le) (rate(a:b{job=~"x|up"}[5m])) / on () group_left (c) d > 0.5',
            {"a:b", "d"},
        ),
        ('absent(up{job="or"} == 1) or vector(0)', {"up"}),
        ("x < 1e-3 and y offset 10m unless z", {"x", "y", "z"}),
        ("histogram_quantile(0.95, sum by (le) (rate(h_bucket[$__rate_interval])))", {"h_bucket"}),
    ],
)
def test_names_are_read_out_of_expressions(expression: str, names: set[str]) -> None:
    assert metric_names(expression) == names


def test_selectors_are_read_with_their_labels() -> None:
    found = list(selectors('rate(a{x="}y",z=~"1"}[5m]) / b{}'))
    assert found == [("a", {"x", "z"}), ("b", set())]


@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_a_rule_asks_for_what_is_exported(rule: dict[str, Any]) -> None:
    asked = metric_names(rule["expr"])
    assert asked and asked <= sample_names() | RECORDED | OF_PROMETHEUS


@pytest.mark.parametrize(("title", "expression"), TARGETS, ids=[title for title, _ in TARGETS])
def test_the_board_asks_for_what_is_exported(title: str, expression: str) -> None:
    asked = metric_names(ready_for_prometheus(expression))
    assert asked and asked <= sample_names() | RECORDED


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_an_alert_says_what_is_wrong_and_where_to_read_on(alert: dict[str, Any]) -> None:
    name, notes = alert["alert"], alert["annotations"]
    assert re.fullmatch(r"Outrider[A-Z]\w+", name)
    assert alert["labels"]["severity"] in ("critical", "warning")
    assert notes["summary"] and notes["description"]
    assert notes["runbook_url"] == f"{DOCS}/alerts.html#{name.lower()}"
    assert f"\n## {name}\n" in (ROOT / "docs" / "alerts.md").read_text()


def test_runbooks_are_of_alerts_that_exist() -> None:
    headings = re.findall(r"^## (Outrider\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.M)
    assert headings == [alert["alert"] for alert in ALERTS]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])
def test_every_alert_is_tested(alert: dict[str, Any]) -> None:
    cases = [case for file in TESTS for case in yaml.safe_load(file.read_text())["tests"]]
    expected = [
        sample["labels"]
        for case in cases
        for test in case["promql_expr_test"]
        for sample in test["exp_samples"]
    ]
    assert any(f'alertname="{alert["alert"]}"' in labels for labels in expected)


@promtool
def test_promtool_finds_no_fault_in_the_rules() -> None:
    subprocess.run(["promtool", "check", "rules", *RULES], check=True, capture_output=True)
    config = MONITORING / "prometheus.yml"
    subprocess.run(["promtool", "check", "config", config], check=True, capture_output=True)


@promtool
def test_alerts_fire_when_they_should_and_only_then() -> None:
    done = subprocess.run(["promtool", "test", "rules", *TESTS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_board_is_one_that_grafana_can_show() -> None:
    panels = BOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {variable["name"] for variable in BOARD["templating"]["list"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert place["x"] + place["w"] <= 24 and not cells & taken, panel["title"]
        taken |= cells
        if panel["type"] != "row":
            assert panel["datasource"]["uid"] == "${datasource}"
            assert panel["description"] and panel["fieldConfig"]["defaults"]["unit"]
    used = set(re.findall(r"\$\{?(\w+)", json.dumps(panels))) - {"__rate_interval"}
    assert used == variables
