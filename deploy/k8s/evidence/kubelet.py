"""Fake kubelets: report nodes as Ready and pods as Running, and bind persistent volume claims.

No container runs.
"""

from __future__ import annotations

import datetime
import threading
import time
from types import TracebackType
from typing import Any, Self

from servers import Api, Document

NODES = 3
START_S = 2.0
"""Time until a pod that was bound to a node is Ready."""
STOP_S = 1.0
"""Time until a pod that is to be deleted is gone."""
HEARTBEAT_S = 5.0
"""Time between two heartbeats of a node."""
CAPACITY = {"cpu": "48", "memory": "400Gi", "pods": "110", "nvidia.com/gpu": "2"}


class FakeKubelets:
    """Create the nodes on entry, and update nodes, pods and claims on one thread until exit."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._seen: dict[str, float] = {}
        self._last_heartbeat_s = 0.0

    def __enter__(self) -> Self:
        for number in range(NODES):
            labels = {"kubernetes.io/hostname": f"node-{number}"}
            labels["topology.kubernetes.io/zone"] = f"zone-{number % 2}"
            node = {"metadata": {"name": f"node-{number}", "labels": labels}}
            self._api.call("POST", "/api/v1/nodes", node)
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(0.2):
            if time.monotonic() - self._last_heartbeat_s > HEARTBEAT_S:
                self._heartbeat()
            for claim in self._api.items("/api/v1/persistentvolumeclaims"):
                if claim["status"]["phase"] == "Pending":
                    self._bind_claim(claim)
            for pod in self._api.items("/api/v1/pods"):
                if pod["spec"].get("nodeName"):
                    self._update_pod(pod)

    def _heartbeat(self) -> None:
        """Report all nodes as Ready."""
        self._last_heartbeat_s = time.monotonic()
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "Fake", "lastHeartbeatTime": now}
        status = {"conditions": [ready], "capacity": CAPACITY, "allocatable": CAPACITY}
        for number in range(NODES):
            path = f"/api/v1/nodes/node-{number}/status"
            self._api.call("PATCH", path, {"status": status})

    def _update_pod(self, pod: Document) -> None:
        """Report a bound pod as Running after START_S; delete a stopping one after STOP_S."""
        meta, status = pod["metadata"], pod["status"]
        path = f"/api/v1/namespaces/{meta['namespace']}/pods/{meta['name']}"
        doing = f"{meta['uid']}{'-stops' if 'deletionTimestamp' in meta else ''}"
        since = time.monotonic() - self._seen.setdefault(doing, time.monotonic())
        if "deletionTimestamp" in meta:
            if since >= STOP_S:
                self._api.call("DELETE", path, {"gracePeriodSeconds": 0})
        elif status.get("phase") != "Running" and since >= START_S:
            running = [_condition(kind) for kind in ("Initialized", "ContainersReady", "Ready")]
            says = {"phase": "Running", "conditions": running, "podIP": "127.0.0.1"}
            self._api.call("PATCH", f"{path}/status", {"status": says}, "strategic-merge")

    def _bind_claim(self, claim: Document) -> None:
        """Create a persistent volume for a pending claim."""
        meta, spec = claim["metadata"], claim["spec"]
        names = {"namespace": meta["namespace"], "name": meta["name"], "uid": meta["uid"]}
        volume: dict[str, Any] = {
            "accessModes": spec["accessModes"],
            "capacity": spec["resources"]["requests"],
            "hostPath": {"path": "/nowhere"},
            "claimRef": names,
            "storageClassName": spec.get("storageClassName", ""),
        }
        name = f"{meta['namespace']}-{meta['name']}"
        self._api.call(
            "POST", "/api/v1/persistentvolumes", {"metadata": {"name": name}, "spec": volume}
        )


def _condition(kind: str) -> Document:
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": kind, "status": "True", "lastTransitionTime": now}
