"""Outrider as a Serve application: `python -m tests.integration.ray_serving ADDRESS PORT MODEL`.

Runs the application on a cluster, asks it twice over HTTP, shuts it down. Prints one JSON object.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

import ray
from outrider_ray.members import member_of
from outrider_ray.serve_app import app
from ray import serve
from ray.util import list_named_actors

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
NAMESPACE = "served"
GONE_S = 60.0


def ask(port: int, **options: Any) -> str:
    """The body of an answer."""
    body = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body | options).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=200.0) as response:
        return str(response.read().decode())


def streamed(port: int) -> list[str]:
    """The pieces of a streamed text."""
    lines = ask(port, stream=True).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


def members() -> list[str]:
    """The actors of the fleet."""
    actors = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == NAMESPACE]
    return sorted(name for name in names if member_of(name) is not None)


def main() -> None:
    """Run it."""
    address, port, model = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    ray.init(address, logging_level="ERROR", log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    # As `serve run outrider_ray.serve_app:app KEY=VALUE` passes them.
    keys = {"model": model, "model_name": "m", "methods": "ngram", "threads": "1"}
    serve.run(app(keys | {"namespace": NAMESPACE, "drain_timeout_s": "1"}))
    found = {
        "whole": json.loads(ask(port))["choices"][0]["text"],
        "streamed": streamed(port),
        "members": members(),
    }
    serve.shutdown()
    end = time.monotonic() + GONE_S
    while members() and time.monotonic() < end:
        time.sleep(0.2)
    print(json.dumps(found | {"left": members()}))


if __name__ == "__main__":
    main()
