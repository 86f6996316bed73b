"""A Ray cluster of supervised nodes on this machine, one of them behind a link that can be cut."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_ray.cluster import descendants

from tests.waiting import wait_until

START_S = 90.0
LOOPBACK = "127.0.0.1"
HEALTH = {"period_ms": 1000, "timeout_ms": 5000, "failure_threshold": 3, "initial_delay_ms": 1000}
"""How soon the cluster gives a silent node up: after some 20 s; a dead one after 3."""


class Link:
    """A network namespace, and its link to this one. Needs CAP_NET_ADMIN and CAP_SYS_ADMIN."""

    def __init__(self) -> None:
        """Raises OSError or CalledProcessError where that is not allowed."""
        number = os.getpid() % 250
        self.namespace = f"outrider-{os.getpid()}"
        self.here, self.there = f"10.79.{number}.1", f"10.79.{number}.2"
        self._near, self._far = f"orn{os.getpid() % 100000}", f"orf{os.getpid() % 100000}"
        _ip("netns", "add", self.namespace)
        try:
            self._connect()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        _ip("link", "add", self._near, "type", "veth", "peer", "name", self._far)
        _ip("link", "set", self._far, "netns", self.namespace)
        _ip("addr", "add", f"{self.here}/24", "dev", self._near)
        _ip("link", "set", self._near, "up")
        self._inside("addr", "add", f"{self.there}/24", "dev", self._far)
        self._inside("link", "set", "lo", "up")
        self.heal()

    def cut(self) -> None:
        """Lose every packet, both ways."""
        self._inside("link", "set", self._far, "down")

    def heal(self) -> None:
        """Carry packets again."""
        self._inside("link", "set", self._far, "up")

    def close(self) -> None:
        """Take both away."""
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("netns", "del", self.namespace)
        with contextlib.suppress(subprocess.CalledProcessError):
            _ip("link", "del", self._near)

    def _inside(self, *arguments: str) -> None:
        _ip("-n", self.namespace, *arguments)


class Node:
    """`outrider ray node`: a node that is started again when it ends."""

    def __init__(self, log: Path, *arguments: str, link: Link | None = None) -> None:
        prefix = ["ip", "netns", "exec", link.namespace] if link else []
        command = [*prefix, sys.executable, "-m", "outrider_ray", "node", *arguments]
        options = ["--object-store-memory=100000000", "--disable-usage-stats"]
        self._log = log
        with log.open("w") as out:
            self._keeper = subprocess.Popen([*command, *options], stderr=out)

    @property
    def starts(self) -> int:
        """How often the node has come up."""
        return self._log.read_text().count("Ray runtime started")

    def wait(self, starts: int = 1) -> None:
        """Return once it has come up so often."""
        wait_until(lambda: self.starts >= starts, timeout_s=START_S, what=f"node: {self._log}")

    def holds(self, pid: int) -> bool:
        """Whether a process is one of this node's."""
        return any(process.pid == pid for process in descendants(self._keeper.pid))

    def kill(self) -> None:
        """kill -9 of every process of the node, but not of what starts it again."""
        for process in descendants(self._keeper.pid):
            process.kill()

    def close(self) -> None:
        """Kill it and what starts it; nothing is left."""
        left = descendants(self._keeper.pid)
        self._keeper.kill()
        self._keeper.wait()
        for process in left:
            process.kill()


@dataclass(frozen=True)
class Nodes:
    """Three nodes of one CPU: the head with one (pretended) GPU and a place for a verifier,
    another with such a place, one with a place for a drafter."""

    address: str
    head: Node
    second: Node
    third: Node
    link: Link | None
    """Between the third and the others; None where there can be none."""


@contextmanager
def three_nodes() -> Generator[Nodes]:
    """The cluster. Sets RAY_TMPDIR and the like for whoever joins it, until the end."""
    # Sockets lie below it, whose paths must be short.
    directory = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    # Else the first start writes a token into the home folder.
    own = {"RAY_TMPDIR": directory, "RAY_AUTH_MODE": "disabled"}
    own |= {f"RAY_health_check_{name}": str(value) for name, value in HEALTH.items()}
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, directory, ignore_errors=True)
        stack.enter_context(_environment(own))
        link = _link()
        if link is not None:
            stack.callback(link.close)
        host = LOOPBACK if link is None else link.here
        address = f"{host}:{free_port(host)}"

        def node(name: str, *arguments: str, of: Link | None = None) -> Node:
            own_host = host if of is None else of.there
            options = (f"--node-ip-address={own_host}", "--num-cpus=1")
            made = Node(Path(directory, f"{name}.log"), *options, *arguments, link=of)
            stack.callback(made.close)
            # One after another: two that start at once get in each other's way.
            made.wait()
            return made

        verifying = '--resources={"verifying": 1}'
        port = address.rpartition(":")[2]
        head = node(
            "head",
            "--head",
            f"--port={port}",
            "--include-dashboard=false",
            "--num-gpus=1",
            verifying,
        )
        second = node("second", f"--address={address}", "--num-gpus=0", verifying)
        drafting = '--resources={"drafting": 1}'
        third = node("third", f"--address={address}", "--num-gpus=0", drafting, of=link)
        yield Nodes(address, head, second, third, link)


def _link() -> Link | None:
    try:
        return Link()
    except (OSError, subprocess.CalledProcessError):
        return None


@contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def free_port(host: str = "") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((host, 0))
        port: int = free.getsockname()[1]
        return port


def _ip(*arguments: str) -> None:
    command = [shutil.which("ip") or "ip", *arguments]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
