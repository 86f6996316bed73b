"""Addresses that a fleet on Ray prints can be dialled, and its status says on which nodes it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray.util
from outrider_ray.commands import describe
from outrider_ray.config import RayFleetConfig, router_config
from outrider_ray.embedded_router import dialable_address, load_router_config
from outrider_ray.fleet import check_namespace
from outrider_ray.supervisor import SERVING, FleetStatus, MemberStatus

from outrider.errors import AlreadyExistsError, FailedPreconditionError, NotFoundError

NODE = "10.0.0.5"


@pytest.mark.parametrize(
    ("bound", "printed"),
    [
        ("0.0.0.0:50050", f"{NODE}:50050"),
        ("[::]:50050", f"{NODE}:50050"),
        ("127.0.0.1:50050", "127.0.0.1:50050"),
        ("10.0.0.9:1", "10.0.0.9:1"),
        ("", ""),
    ],
)
def test_a_wildcard_is_printed_as_the_address_of_the_node(bound: str, printed: str) -> None:
    assert dialable_address(bound, NODE) == printed


def test_a_detached_fleet_listens_where_others_reach_it_and_a_local_one_does_not() -> None:
    local = router_config(RayFleetConfig(model="m"), Path("m"), NODE)
    assert (local.listen, local.metrics_host) == ("127.0.0.1:50050", "127.0.0.1")
    detached = RayFleetConfig(model="m", detached=True, ray_address="auto")
    remote = router_config(detached, Path("m"), NODE)
    assert (remote.listen, remote.metrics_host) == (f"{NODE}:50050", NODE)
    given = RayFleetConfig(
        model="m",
        detached=True,
        ray_address="auto",
        listen="127.0.0.1:1",
        router={"metrics_host": "127.0.0.1"},
    )
    own = router_config(given, Path("m"), NODE)
    assert (own.listen, own.metrics_host) == ("127.0.0.1:1", "127.0.0.1")


def test_the_status_names_nodes_ports_and_what_only_a_node_itself_reaches() -> None:
    status = FleetStatus(
        state=SERVING,
        address="127.0.0.1:50050",
        http=f"{NODE}:8000",
        node=NODE,
        node_id="aa",
        members=(
            MemberStatus(name="verifier-0", pid=7, node=NODE, node_id="bb", metrics=f"{NODE}:9100"),
            MemberStatus(name="drafter-0"),
        ),
    )
    fleet, verifier, drafter = describe(status)
    assert "clients at 127.0.0.1:50050 (only on its node), HTTP at 10.0.0.5:8000," in fleet
    assert fleet.endswith("supervisor on 10.0.0.5 (node aa)")
    assert verifier == "verifier-0 on 10.0.0.5 (node bb), pid 7, metrics at 10.0.0.5:9100"
    assert drafter == "drafter-0 being created"


def test_a_namespace_in_use_is_refused_with_the_fleet_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    actors = [{"name": name, "namespace": "here"} for name in ("verifier-0", "something")]
    monkeypatch.setattr(ray.util, "list_named_actors", lambda all_namespaces: actors)
    with pytest.raises(AlreadyExistsError, match=r"namespace here already .*\(verifier-0\)"):
        check_namespace("here")
    check_namespace("elsewhere")


async def test_a_file_that_the_routers_node_lacks_is_named_with_that_node(
    tiny_target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_ray.embedded_router.get_node_ip_address", lambda: NODE)
    keys = RayFleetConfig(model=str(tiny_target), api_keys=Path("/no/keys.toml"))
    with pytest.raises(NotFoundError, match=f"router's node {NODE}: .*/no/keys.toml"):
        await load_router_config(keys)
    tls = {"cert": Path("/no/cert.pem"), "key": Path("/no/key.pem")}
    certificate = RayFleetConfig(model=str(tiny_target), router={"client_api_tls": tls})
    with pytest.raises(FailedPreconditionError, match=f"router's node {NODE}: .*/no/cert.pem"):
        await load_router_config(certificate)
