"""NetworkPolicies are evaluated as Kubernetes does, and a wrong one is found."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from tests.unit.deploy.combinations import Combination, build
from tests.unit.deploy.manifests import Document
from tests.unit.deploy.policies import Peer, allows, blocked


def test_a_policy_that_is_missing_is_found(tmp_path: Path) -> None:
    (demo,) = build([Combination("cpu-demo", ("networkpolicy",))], tmp_path).values()
    for name, said in (
        ("outrider-dns", "the cluster's DNS"),
        ("outrider-traces", "port 4317"),
        ("outrider-metrics", "a pod of monitoring cannot reach"),
        ("outrider-models", "the Internet"),
        ("outrider-verifier", "StatefulSet/outrider-drafter cannot reach"),
        ("outrider-drafter", "Deployment/outrider-router cannot reach"),
    ):
        missing = ("NetworkPolicy", name)
        broken = [d for d in demo if (d["kind"], d["metadata"]["name"]) != missing]
        assert any(said in problem for problem in blocked(broken)), name


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ({"policyTypes": ["Ingress"], "ingress": [{}]}, "a stranger can reach StatefulSet"),
        ({"policyTypes": ["Egress"], "egress": [{}]}, "can reach a metadata service"),
    ],
)
def test_a_policy_that_lets_anything_pass_is_found(
    spec: Document, said: str, tmp_path: Path
) -> None:
    (demo,) = build([Combination("cpu-demo", ("networkpolicy",))], tmp_path).values()
    metadata = {"name": "anything", "namespace": demo[-1]["metadata"]["namespace"]}
    policy = {"kind": "NetworkPolicy", "metadata": metadata, "spec": {"podSelector": {}, **spec}}
    assert [*blocked(demo)] == []
    assert any(said in problem for problem in blocked([*demo, policy]))


def test_a_policy_is_evaluated_as_kubernetes_does() -> None:
    policy = {
        "kind": "NetworkPolicy",
        "metadata": {"name": "p", "namespace": "a"},
        "spec": {
            "podSelector": {"matchExpressions": [{"key": "x", "operator": "In", "values": ["1"]}]},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [{"podSelector": {"matchLabels": {"y": "1"}}}], "ports": [{"port": "p"}]},
                {"from": [{"ipBlock": {"cidr": "10.0.0.0/8", "except": ["10.1.0.0/16"]}}]},
            ],
        },
    }
    pod = Peer("pod", "a", {"x": "1"}, {"p": 5})
    friend = Peer("friend", "a", {"y": "1"})
    assert allows([policy], friend, pod, 5) and not allows([policy], friend, pod, 6)
    assert not allows([policy], friend, pod, 5, "UDP")
    assert not allows([policy], Peer("other", "b", {"y": "1"}), pod, 5)
    assert allows([policy], Peer("out", address="10.2.0.1"), pod, 7)
    assert not allows([policy], Peer("out", address="10.1.0.1"), pod, 7)
    assert allows([policy], pod, friend, 9), "its egress is not restricted"
    assert allows([policy], friend, Peer("open", "a", {"x": "2"}), 9)
    unknown = copy.deepcopy(policy)
    unknown["spec"]["podSelector"]["matchExpressions"][0]["operator"] = "NotIn"  # type: ignore[index]
    with pytest.raises(ValueError, match="NotIn"):
        allows([unknown], friend, pod, 5)
