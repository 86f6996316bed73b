"""Registers the fleet's metrics, and their vLLM names, in the router's Prometheus registry."""

from __future__ import annotations

from functools import partial

from outrider_router.api import server_status
from outrider_router.api.fleet_metrics import FleetMetrics
from outrider_router.api.vllm_metrics import VllmMetrics
from outrider_router.config import MetricsCompat
from outrider_router.requests.request import served_model_name
from outrider_router.requests.service import RouterService


def register_fleet_metrics(service: RouterService) -> None:
    """Register the fleet metrics in the registry of a router. Call it once per router.

    If the configuration asks for vLLM's metric names, they are registered too.
    """
    registry = service.metrics.registry
    info = partial(server_status.make_server_info, service)
    fleet = service.registry
    registry.register(FleetMetrics(info, lambda: (fleet.desired_verifiers, fleet.desired_drafters)))
    if service.config.metrics_compat is MetricsCompat.VLLM:
        registry.register(VllmMetrics(service.metrics, info, _ModelName(service)))


class _ModelName:
    """Returns the served model's name. The last known name is kept while no verifier is healthy, so
    that no series is renamed.
    """

    def __init__(self, service: RouterService) -> None:
        self._service = service
        self._known = service.config.model_name

    def __call__(self) -> str:
        info = self._service.registry.any_verifier_info()
        if info is not None:
            self._known = served_model_name(self._service.config, info)
        return self._known
