"""The chart's ways in from outside: an Ingress, and routes of the Gateway API."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.deploy.chart import documents, rendered, template
from tests.unit.deploy.manifests import Document, pods, problems
from tests.unit.deploy.policies import Peer, allows, blocked
from tests.unit.deploy.support import configs_of, parse

KINDS = ("Ingress", "HTTPRoute", "GRPCRoute", "BackendTLSPolicy")


def _only(case: str, kind: str) -> Document:
    (found,) = [d for d in documents(case) if d["kind"] == kind]
    return found


def _kinds(*settings: str) -> set[str]:
    result = template("--set", ",".join(settings))
    assert result.returncode == 0, result.stderr
    return {d["kind"] for d in parse(result.stdout)} & {*KINDS}


def test_nothing_leads_in_from_outside_unless_asked() -> None:
    assert not {d["kind"] for d in documents("")} & {*KINDS}


def test_an_ingress_has_class_annotations_hosts_and_certificate(tmp_path: Path) -> None:
    ingress = _only("ingress", "Ingress")
    spec = ingress["spec"]
    assert spec["ingressClassName"] == "nginx"
    assert ingress["metadata"]["annotations"]["nginx.ingress.kubernetes.io/proxy-buffering"]
    hosts = ["llm.example.com", "*.llm.example.com"]
    assert spec["tls"] == [{"secretName": "llm-example-com", "hosts": hosts}]
    assert [rule["host"] for rule in spec["rules"]] == hosts
    # The prefix is not stripped: it is the router's own.
    paths = {path["path"] for rule in spec["rules"] for path in rule["http"]["paths"]}
    assert paths == {configs_of(documents("ingress"), tmp_path)["router"].http_options.root_path}


def test_an_ingress_without_hosts_is_for_all_names() -> None:
    result = template("--set", "ingress.enabled=true")
    (ingress,) = [d for d in parse(result.stdout) if d["kind"] == "Ingress"]
    (rule,) = ingress["spec"]["rules"]
    assert "host" not in rule and rule["http"]["paths"][0]["path"] == "/"
    assert "tls" not in ingress["spec"] and "ingressClassName" not in ingress["spec"]


def test_a_backend_that_is_not_there_is_found() -> None:
    for case, kind in (("ingress", "Ingress"), ("gateway", "HTTPRoute"), ("gateway", "GRPCRoute")):
        broken = [d for d in documents(case) if d["metadata"]["name"] != "demo-outrider-router"]
        assert any("there is no port" in p for p in problems([*broken, _only(case, kind)])), kind


def test_routes_have_gateways_hostnames_and_no_limit_of_time() -> None:
    http, grpc = _only("gateway", "HTTPRoute")["spec"], _only("gateway", "GRPCRoute")["spec"]
    assert http["parentRefs"] == grpc["parentRefs"]
    assert http["parentRefs"] == [
        {"name": "public", "namespace": "gateways", "sectionName": "https"}
    ]
    assert (http["hostnames"], grpc["hostnames"]) == (["llm.example.com"], ["grpc.llm.example.com"])
    assert http["rules"][0]["timeouts"] == {"request": "0s"}
    assert "timeouts" not in grpc["rules"][0], "routes of gRPC have no such field"


def test_gateways_know_routers_that_serve_tls_by_the_name_of_their_role() -> None:
    policy = _only("gateway", "BackendTLSPolicy")["spec"]
    (certificate,) = [
        d["spec"]
        for d in documents("gateway")
        if d["kind"] == "Certificate" and d["metadata"]["name"] == "demo-outrider-router"
    ]
    assert policy["validation"]["hostname"] in certificate["dnsNames"]
    assert [t["name"] for t in policy["targetRefs"]] == ["demo-outrider-router"]
    route = "gateway.httpRoute.enabled=true,gateway.httpRoute.parentRefs[0].name=public"
    assert _kinds(route) == {"HTTPRoute"}


def test_policies_let_the_controller_in_and_no_stranger() -> None:
    found = documents("ingress")
    assert [*blocked(found)] == []
    (router,) = [pod for pod in pods(found) if pod.owner == "Deployment/demo-outrider-router"]
    own = Peer("router", "team", router.labels, {"http": 8000, "grpc": 50050})
    nginx = {"app.kubernetes.io/name": "ingress-nginx"}
    assert allows(found, Peer("controller", "ingress-nginx", nginx), own, 8000)
    assert not allows(found, Peer("impostor", "elsewhere", nginx), own, 8000)


GATEWAY = "gateway.{0}.enabled=true,gateway.{0}.parentRefs[0].name=public"
BOTH = f"{GATEWAY.format('httpRoute')},{GATEWAY.format('grpcRoute')}"
NAMED = "gateway.{0}.hostnames[0]={1}"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("gateway.httpRoute.enabled=true", "gateway.httpRoute.parentRefs is empty"),
        ("gateway.grpcRoute.enabled=true", "gateway.grpcRoute.parentRefs is empty"),
        (f"{GATEWAY.format('grpcRoute')},tls.enabled=true", "gateway.backendCaConfigMap"),
        ("ingress.enabled=true,networkPolicy.enabled=true", "networkPolicy.clients is empty"),
        (f"{GATEWAY.format('httpRoute')},networkPolicy.enabled=true", "gateway.httpRoute would"),
        ("router.service.type=NodePort,networkPolicy.enabled=true", "service.type NodePort would"),
        (BOTH, "share a hostname at a listener of the gateway public"),
        (f"{BOTH},{NAMED.format('httpRoute', 'a.example.com')}", "share a hostname"),
        (
            f"{BOTH},{NAMED.format('httpRoute', '*.example.com')}"
            f",{NAMED.format('grpcRoute', 'a.example.com')}",
            "share a hostname",
        ),
        ("ingress.hosts[0]=https://a.example.com", "pattern"),
        ("ingress.host=a.example.com", "host"),
        ("gateway.httpRoute.timeouts.requests=1s", "requests"),
    ],
)
def test_what_cannot_work_is_refused_with_a_reason(settings: str, said: str) -> None:
    result = template("--set", settings)
    assert result.returncode != 0 and said in result.stderr, result.stderr


@pytest.mark.parametrize(
    "apart",
    [
        "gateway.httpRoute.parentRefs[0].sectionName=https"
        ",gateway.grpcRoute.parentRefs[0].sectionName=grpc",
        "gateway.httpRoute.parentRefs[0].port=443,gateway.grpcRoute.parentRefs[0].port=50050",
        "gateway.grpcRoute.parentRefs[0].namespace=elsewhere",
        f"{NAMED.format('httpRoute', 'a.example.com')}"
        f",{NAMED.format('grpcRoute', '*.a.example.com')}",
    ],
)
def test_routes_at_other_listeners_or_names_go_together(apart: str) -> None:
    assert _kinds(BOTH, apart) == {"HTTPRoute", "GRPCRoute"}


def test_a_gateway_that_knows_no_timeouts_gets_none() -> None:
    setting = f"{GATEWAY.format('httpRoute')},gateway.httpRoute.timeouts=null"
    assert "timeouts:" not in template("--set", setting).stdout
    assert "timeouts:" in rendered("gateway")
