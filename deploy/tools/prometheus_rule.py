"""The rules of deploy/monitoring/rules as a PrometheusRule, for the Prometheus operator.

python deploy/tools/prometheus_rule.py > deploy/k8s/components/monitoring/prometheus-rule.yaml
"""

from __future__ import annotations

import sys
from pathlib import Path

RULES = Path(__file__).resolve().parents[1] / "monitoring" / "rules"
_HEAD = """\
# Written by `make generated` from deploy/monitoring/rules, where promtool tests them: edit those.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: outrider
  labels: {app.kubernetes.io/name: outrider}
spec:
  groups:
"""
_GROUPS = "groups:"


def prometheus_rule(files: list[str]) -> str:
    """The manifest, of the texts of files of rules. Raises ValueError for another kind of file."""
    return _HEAD + "".join(line for text in files for line in _groups(text))


def _groups(text: str) -> list[str]:
    _, found, groups = f"\n{text}".partition(f"\n{_GROUPS}\n")
    if not found:
        raise ValueError(f"a file of rules has a line {_GROUPS!r}")
    # As it is, two levels deeper: comments and long expressions stay what they are.
    indent = "    " if groups.startswith("-") else "  "
    return [indent + line if line.strip() else line for line in groups.splitlines(keepends=True)]


if __name__ == "__main__":
    paths = sorted(RULES.glob("*.yml"))
    sys.stdout.write(prometheus_rule([path.read_text("utf-8") for path in paths]))
