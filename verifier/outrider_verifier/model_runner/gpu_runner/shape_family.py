"""Batch shapes to capture as GPU graphs, from the verifier's settings. Pure function."""

from __future__ import annotations

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider_verifier.config import VerifierConfig


def shape_family_for(
    config: VerifierConfig, *, in_process_nodes: int, features: bool
) -> ShapeFamily:
    """The shapes of a verifier's rounds; as `ShapeFamily`."""
    return ShapeFamily(
        max_rows=config.max_sessions,
        # Beside an in-process drafter, too: a lookup drafts for whom its plan says so. Unless it
        # is simulated what stands, which is for that head's chains.
        max_nodes=1
        if in_process_nodes and config.simulated_acceptance
        else 1 + config.max_tree_nodes,
        in_process_nodes=in_process_nodes,
        features=features,
        judges=not config.simulated_acceptance,
    )
