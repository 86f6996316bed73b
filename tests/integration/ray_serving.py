"""Outrider as a Serve application: `python -m tests.integration.ray_serving PORT MODEL JOURNAL`.

Runs the application on a local Ray, asks it over HTTP, kills its replica, asks again and deletes
it. Then kills the replica of another one and deletes that. Prints one JSON object.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import urllib.request
from pathlib import Path
from typing import Any

import ray
from outrider_ray.members import member_of
from outrider_ray.serve_app import app
from ray import serve
from ray.exceptions import RayError
from ray.util import list_named_actors, placement_group_table

from outrider.client import Client, RetryPolicy, user
from tests.integration.ray_nodes import free_port
from tests.waiting import wait_until

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 1, 2]
NAMESPACE = "served"
OTHER_NAMESPACE = "orphaned"
GONE_S = 60.0
BACK_S = 150.0
"""A replica is started and takes actors over; on a machine with other work."""
LONG = 700
"""Tokens of a stream in whose course the replica is lost."""


def request_for(port: int, **options: Any) -> urllib.request.Request:
    """A request for a completion."""
    body = {
        "model": "m",
        "prompt": PROMPT,
        "max_tokens": 24,
        "temperature": 0.0,
        "ignore_eos": True,
    }
    return urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body | options).encode(),
        headers={"Content-Type": "application/json"},
    )


def ask(port: int, **options: Any) -> str:
    """The body of an answer."""
    with urllib.request.urlopen(request_for(port, **options), timeout=200.0) as response:
        return str(response.read().decode())


def streamed(port: int) -> list[str]:
    """The pieces of a streamed text."""
    lines = ask(port, stream=True).splitlines()
    events = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert events.pop() == "[DONE]"
    return [json.loads(event)["choices"][0]["text"] for event in events]


def members(namespace: str = NAMESPACE) -> dict[str, int]:
    """The actors of a fleet, and their process ids; 0 of one that does not answer."""
    actors: Any = list_named_actors(all_namespaces=True)
    names = [actor["name"] for actor in actors if actor["namespace"] == namespace]
    return {name: pid_of(name, namespace) for name in sorted(names) if member_of(name) is not None}


def pid_of(name: str, namespace: str) -> int:
    """The process id of an actor, or 0."""
    try:
        actor: Any = ray.get_actor(name, namespace=namespace)
        pid: int = ray.get(actor.__ray_call__.remote(lambda _: os.getpid()), timeout=30.0)
    except (ValueError, RayError):
        return 0
    return pid


def groups() -> list[str]:
    """Names of the placement groups that hold resources."""
    table = placement_group_table().values()
    return [group["name"] for group in table if group["state"] != "REMOVED"]


def replica(application: str) -> int:
    """The process id of an application's replica."""
    for line in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if line.read_text().startswith(f"ray::ServeReplica:{application}:"):
                return int(line.parent.name)
        except OSError:
            continue
    raise AssertionError(f"{application} has no replica")


def kill_during_streams(application: str, port: int, listen: str) -> dict[str, str]:
    """Kill a replica while it answers over HTTP and over gRPC, and say how both texts end."""
    options: dict[str, Any] = {"max_tokens": LONG, "ignore_eos": True, "temperature": 0.0}
    prompt, retry = [user("1 2 3 1 2 3")], RetryPolicy(max_attempts=1, resume_s=BACK_S)
    with Client(listen, timeout_s=200.0, retry=retry) as client:
        plain = client.generate(prompt, **options).token_ids
        ids: list[int] = []
        with (
            urllib.request.urlopen(request_for(port, stream=True, **options)) as response,
            client.stream(prompt, **options) as stream,
        ):
            response.readline()
            for delta in stream:
                if not ids:
                    os.kill(replica(application), signal.SIGKILL)
                ids += delta.token_ids
            try:
                ending = "complete" if b"[DONE]" in response.read() else "cut without an error"
            except http.client.IncompleteRead:
                ending = "cut with an error"
    return {"grpc": "the same text" if tuple(ids) == plain else "another text", "http": ending}


def answers(port: int) -> bool:
    """Whether the application answers over HTTP."""
    try:
        return bool(ask(port, max_tokens=4))
    except (OSError, http.client.HTTPException):
        return False


def main() -> None:
    """Run it."""
    port, model, journal = int(sys.argv[1]), sys.argv[2], sys.argv[3]
    ray.init("local", num_cpus=4, include_dashboard=False, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    # As `serve run outrider_ray.serve_app:app KEY=VALUE` passes them.
    keys = {"model": model, "model_name": "m", "methods": "ngram", "threads": "1"}
    keys |= {"drain_timeout_s": "1"}
    listen, name = f"127.0.0.1:{free_port()}", f"first{port}"
    own = keys | {"namespace": NAMESPACE, "listen": listen, "journal": journal}
    serve.run(app(own), name=name, route_prefix="/")
    found: dict[str, Any] = {
        "whole": json.loads(ask(port))["choices"][0]["text"],
        "streamed": streamed(port),
        "members": members(),
    }
    found["ends"] = kill_during_streams(name, port, listen)
    wait_until(lambda: answers(port), timeout_s=BACK_S, what="a replica that answers")
    found["members_after"] = members()
    found["whole_after"] = json.loads(ask(port))["choices"][0]["text"]
    serve.delete(name)
    wait_until(lambda: not members(), timeout_s=GONE_S, what="the end of the actors")
    found["left"] = [*members(), *groups()]

    name = f"second{port}"
    own = keys | {"namespace": OTHER_NAMESPACE, "orphan_timeout_s": "3"}
    serve.run(app(own), name=name, route_prefix="/")
    orphans = members(OTHER_NAMESPACE)
    os.kill(replica(name), signal.SIGKILL)
    serve.delete(name)
    wait_until(lambda: not members(OTHER_NAMESPACE), timeout_s=GONE_S, what="the end of orphans")
    wait_until(lambda: not groups(), timeout_s=GONE_S, what="the release of their resources")
    serve.shutdown()
    print(json.dumps(found | {"orphans": orphans}))


if __name__ == "__main__":
    main()
