"""Writes the chart's values.schema.json: deploy/helm/values.schema.in.json with the schemas of the
processes in place of "CONFIG <role>". Keys that the chart sets itself are left out.

    python deploy/tools/values_schema.py > deploy/helm/outrider/values.schema.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from outrider.config.process_registry import PROCESSES
from outrider.config.schema import json_schema

TEMPLATE = Path(__file__).resolve().parents[1] / "helm" / "values.schema.in.json"
SET_BY_CHART = (
    *("listen", "http", "metrics_host", "metrics_port", "verifier_id", "drafter_id"),
    *("tls", "client_api_tls", "api_keys", "journal"),
)
_MARK = "CONFIG "


def values_schema(template: str) -> str:
    """Return the schema as text; `template` is the schema of the chart's own values."""
    return json.dumps(_filled(json.loads(template)), indent=1, ensure_ascii=False) + "\n"


def _filled(node: Any) -> Any:
    if isinstance(node, dict):
        return {key: _filled(child) for key, child in node.items()}
    if isinstance(node, list):
        return [_filled(child) for child in node]
    if isinstance(node, str) and node.startswith(_MARK):
        return _config(node.removeprefix(_MARK))
    return node


def _config(role: str) -> dict[str, object]:
    process = PROCESSES[role]
    schema = json_schema(process.table, process.title)
    properties = schema["properties"]
    assert isinstance(properties, dict)
    kept = {key: said for key, said in properties.items() if key not in SET_BY_CHART}
    return {"type": "object", "additionalProperties": False, "properties": kept}


if __name__ == "__main__":
    sys.stdout.write(values_schema(TEMPLATE.read_text("utf-8")))
