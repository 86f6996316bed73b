"""The rules of deploy/monitoring/rules for the Prometheus operator: as a PrometheusRule, or with
--groups as its groups alone, from which the chart makes one.

python deploy/tools/prometheus_rule.py > deploy/k8s/components/monitoring/prometheus-rule.yaml
python deploy/tools/prometheus_rule.py --groups > deploy/helm/outrider/files/rules.yaml
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

RULES = Path(__file__).resolve().parents[1] / "monitoring" / "rules"
_ORIGIN = """\
# Written by `make generated` from deploy/monitoring/rules, where promtool tests them: edit those.
"""
_MANIFEST = """\
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: outrider
  labels: {app.kubernetes.io/name: outrider}
spec:
"""
_GROUPS = "groups:"


def prometheus_rule(files: list[str]) -> str:
    """The manifest, of the texts of files of rules. Raises ValueError for another kind of file."""
    return _ORIGIN + _MANIFEST + "".join(_indented(_all_groups(files), "  "))


def rule_groups(files: list[str]) -> str:
    """The key `groups` of the manifest's spec. Raises ValueError as `prometheus_rule`."""
    return _ORIGIN + "".join(_all_groups(files))


def _all_groups(files: list[str]) -> list[str]:
    return [f"{_GROUPS}\n", *(line for text in files for line in _groups(text))]


def _groups(text: str) -> list[str]:
    _, found, groups = f"\n{text}".partition(f"\n{_GROUPS}\n")
    if not found:
        raise ValueError(f"a file of rules has a line {_GROUPS!r}")
    # Text, not parsed YAML: comments and long expressions stay what they are.
    return _indented(groups.splitlines(keepends=True), "  " if groups.startswith("-") else "")


def _indented(lines: list[str], indent: str) -> list[str]:
    return [indent + line if line.strip() else line for line in lines]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--groups", action="store_true", help="Write the groups alone")
    paths = sorted(RULES.glob("*.yml"))
    write = rule_groups if parser.parse_args().groups else prometheus_rule
    sys.stdout.write(write([path.read_text("utf-8") for path in paths]))
