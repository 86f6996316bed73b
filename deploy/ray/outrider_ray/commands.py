"""Commands `status`, `stop` and `node`: control of a detached fleet and of a Ray node."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from outrider.errors import UnavailableError
from outrider.logs import setup_logging

if TYPE_CHECKING:
    from outrider_ray.supervisor import FleetStatus

NAMES = STATUS, STOP, NODE = ("status", "stop", "node")
DEFAULT_NAMESPACE = "outrider"


def run_command(arguments: Sequence[str]) -> int:
    """Run the command that the first argument names and return its exit status.

    Raises OutriderError.
    """
    name, *rest = arguments
    if name == NODE:
        from outrider_ray.node_keeper import keep_node

        setup_logging("INFO")
        return keep_node(rest)
    args = make_command_parser(name).parse_args(rest)
    from outrider_ray.supervisor import fleet_status, stop_detached

    with joined(args.ray_address, args.namespace):
        if name == STOP:
            return 0 if stop_detached(args.namespace) else 1
        status = fleet_status(args.namespace)
    if args.json:
        sys.stdout.write(json.dumps(dataclasses.asdict(status)) + "\n")
    else:
        sys.stdout.write("".join(f"{line}\n" for line in describe(status)))
    return 0


def describe(status: FleetStatus) -> Iterator[str]:
    """Yield a line for the fleet and one for each of its actors."""
    parts = [f"fleet {status.state}"]
    if status.address:
        parts.append(f"clients at {status.address}{_only_local(status.address)}")
    if status.http:
        parts.append(f"HTTP at {status.http}{_only_local(status.http)}")
    if status.metrics:
        parts.append(f"metrics at {status.metrics}")
    restarted = ", restarted" if status.restarted else ""
    parts.append(f"supervisor on {status.node} (node {status.node_id}{restarted})")
    if status.problem is not None:
        parts.append(status.problem.message)
    yield ", ".join(parts)
    for member in status.members:
        gpus = f", GPUs {', '.join(member.gpus)}" if member.gpus else ""
        metrics = f", metrics at {member.metrics}" if member.metrics else ""
        if member.pid:
            where = f"on {member.node} (node {member.node_id}), pid {member.pid}{gpus}{metrics}"
        else:
            where = "being created"
        yield f"{member.name} {where}"


def _only_local(address: str) -> str:
    """Return a remark on an address at which only its own node can be reached; else ""."""
    host = address.rpartition(":")[0]
    return " (only on its node)" if host in ("127.0.0.1", "localhost", "[::1]") else ""


@contextmanager
def joined(address: str, namespace: str) -> Iterator[None]:
    """Connect to a running Ray cluster for the duration of a `with` block. Raises UnavailableError
    (NO_RAY)."""
    import ray

    try:
        ray.init(address, namespace=namespace, log_to_driver=False, configure_logging=False)
    except (ConnectionError, RuntimeError, OSError, ValueError) as error:
        raise UnavailableError(
            f"cannot connect to Ray at {address}: {error}", reason="NO_RAY"
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


def make_command_parser(name: str) -> argparse.ArgumentParser:
    """Return the parser of the command `status` or `stop`."""
    texts = {
        STATUS: "Show the state of a detached fleet.",
        STOP: "Drain a detached fleet and stop it.",
    }
    parser = argparse.ArgumentParser(prog=f"outrider ray {name}", description=texts[name])
    add = parser.add_argument
    add(
        "--ray-address",
        metavar="ADDR",
        default="auto",
        help="Address of the Ray cluster, HOST:PORT or auto (default: auto).",
    )
    add(
        "--namespace",
        default=DEFAULT_NAMESPACE,
        help=f"Ray namespace of the fleet (default: {DEFAULT_NAMESPACE}).",
    )
    if name == STATUS:
        add("--json", action="store_true", help="Print one JSON object instead of text.")
    return parser
