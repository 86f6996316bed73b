"""The chart's models of the hub, sizes, journals of routers and affinity of clients."""

from __future__ import annotations

import pytest

from tests.unit.deploy.chart import documents
from tests.unit.deploy.manifests import Document, pods


def _fetching(case: str) -> dict[str, Document]:
    """The containers that fetch, by the role of their pods; models is the Job."""
    return {
        pod.labels["app.kubernetes.io/component"]: container
        for pod in pods(documents(case))
        for _, container in pod.containers()
        if "pull" in container.get("command", ())
    }


def test_a_token_of_the_hub_reaches_those_that_download_and_no_one_else() -> None:
    token = {"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    offline = {"name": "HF_HUB_OFFLINE", "value": "1"}
    for case, expected in (
        ("hub", {"router": token, "verifier": token, "drafter": token}),
        ("hub-volume", {"router": offline, "verifier": offline, "drafter": offline}),
    ):
        found = _fetching(case)
        job = found.pop("models", None)
        assert (job is None) == (case == "hub") and (job is None or job["env"] == [token])
        assert {role: container["env"] for role, container in found.items()} == {
            role: [env] for role, env in expected.items()
        }
        for pod in pods(documents(case)):
            for _, container in pod.processes():
                assert offline in container["env"] and token not in container["env"]


def test_a_router_gets_the_tokenizer_alone_with_its_own_image() -> None:
    found = _fetching("hub")
    pull = ["outrider", "models", "pull"]
    assert found["router"]["command"] == [*pull, "--tokenizer-only", "owner/name"]
    assert found["verifier"]["command"] == [*pull, "owner/name"]
    assert found["router"]["image"].startswith("outrider-router:")
    assert found["verifier"]["image"].startswith("outrider-verifier:")


def _limits(case: str, role: str) -> dict[str, str]:
    """The limits of the volumes that the pods of a role have in memory or on their node's disk."""
    (pod,) = (p for p in pods(documents(case)) if p.labels["app.kubernetes.io/component"] == role)
    return {v["name"]: v["emptyDir"]["sizeLimit"] for v in pod.spec["volumes"] if "emptyDir" in v}


def test_sizes_of_volumes_and_memory_are_settings() -> None:
    found = _fetching("hub")
    memory = {role: c["resources"]["limits"]["memory"] for role, c in found.items()}
    assert memory == {"router": "1Gi", "verifier": "6Gi", "drafter": "6Gi"}
    assert _limits("hub", "verifier") == {"models": "40Gi", "tmp": "8Gi", "shm": "1Gi"}
    assert _limits("hub", "router") == {"models": "40Gi", "tmp": "1Gi"}
    assert _limits("hub-volume", "models") == {"tmp": "4Gi"}
    (claim,) = (d for d in documents("hub-volume") if d["kind"] == "PersistentVolumeClaim")
    assert claim["spec"]["resources"] == {"requests": {"storage": "200Gi"}}


@pytest.mark.parametrize(
    ("case", "kind"), [("", None), ("hub-volume", "Deployment"), ("hub", "StatefulSet")]
)
def test_routers_have_a_journal_each_if_that_is_set(case: str, kind: str | None) -> None:
    (router,) = (pod for pod in pods(documents(case)) if pod.owner.endswith("-router"))
    ((_, container),) = router.processes()
    mounts = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
    journals = [a for a in container["args"] if a.startswith("--journal")]
    if kind is None:
        assert not journals and "journal" not in mounts
        return
    assert router.owner == f"{kind}/demo-outrider-router"
    assert journals == [f"--journal={mounts['journal']}/router.log"]
    volumes = {v["name"]: v for v in router.spec["volumes"]}
    if kind == "StatefulSet":
        # Pods of a Deployment would share one claim.
        assert router.claims == {"journal"} and "journal" not in volumes
    else:
        assert volumes["journal"]["emptyDir"] == {"sizeLimit": "1Gi"}


def test_affinity_of_clients_to_routers_is_off_unless_it_is_set() -> None:
    for case, expected in (("", "None"), ("hub", "ClientIP")):
        services = [d for d in documents(case) if d["kind"] == "Service"]
        (router,) = (d["spec"] for d in services if d["metadata"]["name"].endswith("-router"))
        assert router["sessionAffinity"] == expected
