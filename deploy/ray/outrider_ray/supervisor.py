"""Supervisor of a detached fleet: an actor that outlives the process that started it.

If its process or its node dies, Ray restarts the supervisor on any node with enough resources. The
supervisor then finds the running actors by their names and takes them over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from outrider.errors import (
    NotFoundError,
    OutriderError,
    UnavailableError,
)
from outrider.process_tuning import run_event_loop, tune_garbage_collector
from outrider.transport.error_codec import ErrorStatus, from_status, to_status
from outrider.transport.ray import ActorLocation
from outrider.transport.ray.calls import actor_named
from outrider_ray.actor_keeper import MIN_BACKOFF_S, next_pause
from outrider_ray.config import RayFleetConfig
from outrider_ray.fleet import check_namespace, existing_members, namespace_in_use
from outrider_ray.members import FleetMember, group_name

logger = logging.getLogger(__name__)

SUPERVISOR = "supervisor"
"""Name of the supervisor's actor in the namespace of its fleet."""
STARTING, SERVING, FAILED, STOPPED = STATES = ("starting", "serving", "failed", "stopped")
STOP_S = 60.0
"""Seconds that a fleet gets to end, in addition to the time that running requests get to finish."""
_ASK_S = 30.0
_LOOK_S = 0.2
_CONCURRENCY = 8
_MEMORY = 256 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberStatus:
    """Status of one actor of a fleet."""

    name: str
    pid: int = 0
    """Process id of the actor; 0 while the actor is being created or replaced."""
    node: str = ""
    """Address of the actor's node."""
    node_id: str = ""
    """Ray's id of the actor's node, as in `ray list nodes`."""
    gpus: tuple[str, ...] = ()
    metrics: str = ""
    """HOST:PORT of the actor's Prometheus endpoint; "" if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """Status of a fleet as its supervisor reports it."""

    state: str = STARTING
    """State of the fleet: starting, serving, failed or stopped."""
    address: str = ""
    """HOST:PORT of the client API."""
    http: str = ""
    """HOST:PORT of the OpenAI-compatible HTTP API; "" if there is none."""
    metrics: str = ""
    """HOST:PORT of the Prometheus endpoint; "" if there is none."""
    node: str = ""
    """Address of the supervisor's node."""
    node_id: str = ""
    """Ray's id of the supervisor's node."""
    pid: int = 0
    """Process id of the supervisor on its node."""
    restarted: bool = False
    """Whether Ray has restarted the supervisor."""
    problem: ErrorStatus | None = None
    """Error that prevented the fleet from starting; None if there was none."""
    members: tuple[MemberStatus, ...] = field(default=())


class SupervisorHost:
    """Supervisor actor. It manages the fleet on a thread with its own event loop."""

    def __init__(self, config: RayFleetConfig) -> None:
        """Start the fleet in the background. After a restart of the actor, Ray calls only this
        constructor."""
        import ray

        from outrider_ray.actors import prepare

        prepare(0, config.log_level)
        self._config = config
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._fleet: Any = None
        context = ray.get_runtime_context()
        self._restarted = bool(context.was_current_actor_reconstructed)
        self._status = FleetStatus(
            node=ray.util.get_node_ip_address(),
            node_id=context.get_node_id(),
            pid=os.getpid(),
            restarted=self._restarted,
        )
        self._thread = threading.Thread(target=self._run, name="outrider-fleet", daemon=True)
        self._thread.start()

    def status(self) -> FleetStatus:
        """Return the fleet's present status."""
        status, fleet = self._status, self._fleet
        if fleet is None:
            return status
        members = sorted(fleet.members.items())
        return replace(status, members=tuple(self._member_status(*each) for each in members))

    def _member_status(self, member: FleetMember, where: ActorLocation | None) -> MemberStatus:
        if where is None:
            return MemberStatus(name=member.name)
        port = self._config.metrics_port_of(member)
        metrics = "" if port < 0 else f"{where.node}:{port}"
        return MemberStatus(name=member.name, metrics=metrics, **asdict(where))

    def stop(self) -> bool:
        """Drain and stop the fleet; return whether it ended in time."""
        loop, stop = self._loop, self._stop
        if loop is not None and stop is not None:
            loop.call_soon_threadsafe(stop.set)
        self._thread.join(STOP_S + self._config.drain_timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        pause_s = MIN_BACKOFF_S / 2.0
        while self._status.state == STARTING:
            try:
                run_event_loop(self._serve())
                self._become(STOPPED)
            except OutriderError as error:
                logger.error("fleet start failed", extra={"problem": error.message})
                if not self._restarted:
                    self._become(FAILED, problem=to_status(error))
                    return
                # The fleet has served before, so a missing node or a name in use is temporary.
                pause_s = next_pause(pause_s, 0.0)
                time.sleep(pause_s)
            except Exception as error:
                logger.exception("supervision failed")
                self._become(FAILED, problem=to_status(error))

    async def _serve(self) -> None:
        from outrider_ray.fleet_lifecycle import supervise

        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        await supervise(self._config, self._stop, self._serving, resume=self._restarted)

    def _serving(self, fleet: Any, front: Any) -> None:
        self._fleet = fleet
        tune_garbage_collector()
        found = {"address": front.address, "http": front.http, "metrics": front.metrics}
        self._become(SERVING, **found)

    def _become(self, state: str, **facts: Any) -> None:
        self._status = replace(self._status, state=state, **facts)


def start_detached(config: RayFleetConfig) -> FleetStatus:
    """Start a supervisor and wait until its fleet serves. Ray must have been initialised.

    Raises AlreadyExistsError (NAME_IN_USE) if the namespace already has a fleet, and the errors of
    the fleet's start.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    check_namespace(config.namespace)
    here = ray.get_runtime_context().get_node_id()
    options = {
        "name": SUPERVISOR,
        "namespace": config.namespace,
        "lifetime": "detached",
        "num_cpus": 0,
        # Ray ignores the scheduling strategy of an actor that reserves no resources.
        "memory": _MEMORY,
        "max_restarts": -1,
        "max_concurrency": _CONCURRENCY,
        # Prefer this node, but use another one if it is gone.
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=here, soft=True),
    }
    try:
        actor: Any = ray.remote(SupervisorHost).options(**options).remote(config)
    except ValueError as error:
        raise namespace_in_use(config.namespace) from error
    while True:
        # The start of a fleet is bounded by its own timeouts.
        status: FleetStatus = _ask(actor, "status", _ASK_S)
        if status.state == SERVING:
            return status
        if status.state != STARTING:
            ray.kill(actor)
            if status.problem is not None:
                raise from_status(status.problem)
            raise UnavailableError("the fleet was stopped", reason="STOPPING")
        time.sleep(_LOOK_S)


def fleet_status(namespace: str) -> FleetStatus:
    """Return the status that the supervisor of a namespace reports. Raises NotFoundError (NO_FLEET)
    or UnavailableError."""
    status: FleetStatus = _ask(_find(namespace), "status", _ASK_S)
    return status


def stop_detached(namespace: str) -> bool:
    """Drain and stop the fleet of a namespace, then its supervisor; return whether all ended in
    time.

    Actors that a dead supervisor has left are killed. Raises NotFoundError if the namespace has
    neither supervisor nor actors. Raises UnavailableError, after killing the supervisor, if the
    supervisor does not answer.
    """
    import ray

    try:
        actor = _find(namespace)
    except NotFoundError:
        if not existing_members(namespace):
            raise
        return _kill_members(namespace)
    try:
        in_time = bool(_ask(actor, "stop", 10 * STOP_S))
    finally:
        ray.kill(actor)
        # An actor that was being created at that moment has no supervisor any more.
        gone = _kill_members(namespace)
    return in_time and gone


def _kill_members(namespace: str) -> bool:
    """Kill all actors of a fleet and release their placement groups; return whether Ray has
    released all actors in time."""
    import ray
    from ray.util import get_placement_group, remove_placement_group

    until = time.monotonic() + STOP_S
    # Ray lists an actor until its process has ended or its node is given up.
    while there := existing_members(namespace):
        for member in there:
            with contextlib.suppress(UnavailableError):
                ray.kill(actor_named(member.name, namespace))
            # A placement group has the name of its first member.
            with contextlib.suppress(ValueError):
                remove_placement_group(get_placement_group(group_name((member,))))
        if time.monotonic() > until:
            names = [member.name for member in there]
            logger.warning("actors not released by Ray", extra={"actors": names})
            return False
        time.sleep(_LOOK_S)
    return True


def _find(namespace: str) -> Any:
    try:
        return actor_named(SUPERVISOR, namespace)
    except UnavailableError:
        raise NotFoundError(
            f"the namespace {namespace} has no detached fleet", reason="NO_FLEET"
        ) from None


def _ask(actor: Any, method: str, timeout_s: float) -> Any:
    import ray
    from ray.exceptions import RayError

    try:
        return ray.get(getattr(actor, method).remote(), timeout=timeout_s)
    except RayError as error:
        raise UnavailableError(
            f"the supervisor did not answer: {type(error).__name__}", reason="PEER_LOST"
        ) from error
