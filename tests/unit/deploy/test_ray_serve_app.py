"""What a Serve application is told is what the launcher's file says."""

from __future__ import annotations

import pytest

from outrider.errors import InvalidRequestError
from outrider.spec.plan import DraftMethod

serve_app = pytest.importorskip("outrider_ray.serve_app", reason="needs ray[serve]")


def test_text_of_a_command_line_and_values_of_a_file_mean_the_same() -> None:
    text = {"model": "m", "methods": "ngram,none", "verifiers": "2", "cpus_per_actor": "1.5"}
    values = {"model": "m", "methods": ["ngram", "none"], "verifiers": 2, "cpus_per_actor": 1.5}
    config = serve_app.launch_config(text | {"autoscale": '{"max_drafters": 3}'})
    assert config == serve_app.launch_config(values | {"autoscale": {"max_drafters": 3}})
    assert (config.verifiers, config.autoscale.max_drafters) == (2, 3)
    assert config.methods == (DraftMethod.NGRAM, DraftMethod.NONE)
    # Names that look like numbers are names.
    assert serve_app.launch_config({"model": "7"}).model == "7"


def test_its_fleet_is_on_the_cluster_that_serve_runs_on() -> None:
    config = serve_app.launch_config({"model": "m"})
    assert config.ray_address and config.ray.listen_host == ""
    assert config.listen == "127.0.0.1:0"


def test_its_actors_outlive_a_replica_and_the_next_one_takes_over_only_its_own() -> None:
    config = serve_app.launch_config({"model": "m"})
    assert config.detached
    own = serve_app.fleet_identity("a", config)
    assert serve_app.fleet_identity("a", serve_app.launch_config({"model": "m"})) == own
    assert serve_app.fleet_identity("b", config) != own
    other = serve_app.launch_config({"model": "m", "kv_tokens": 512})
    assert serve_app.fleet_identity("a", other) != own


@pytest.mark.parametrize("args", [{"modle": "m"}, {"model": "m", "verifiers": "two"}])
def test_unknown_keys_and_bad_values_are_refused(args: dict[str, str]) -> None:
    with pytest.raises(InvalidRequestError):
        serve_app.launch_config(args)


def test_a_fleet_that_outlives_its_application_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="detached"):
        serve_app.launch_config({"model": "m", "detached": True, "ray_address": "auto"})
