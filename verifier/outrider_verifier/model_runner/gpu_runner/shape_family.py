"""Chooses the batch shapes to capture as CUDA graphs from the verifier's settings. Pure."""

from __future__ import annotations

from outrider.engine.device.graphs.shape_family import ShapeFamily
from outrider_verifier.config import VerifierConfig


def shape_family_for(
    config: VerifierConfig,
    *,
    in_process_nodes: int,
    features: bool,
    remote_distributions: bool = False,
) -> ShapeFamily:
    """Return the batch shapes of a verifier's rounds; `ShapeFamily` describes the arguments."""
    return ShapeFamily(
        max_rows=config.max_sessions,
        # Sessions may use n-gram drafts beside an in-process drafter too. Simulated acceptance is
        # only for chains of the in-process drafter.
        max_nodes=1
        if in_process_nodes and config.simulated_acceptance
        else 1 + config.max_tree_nodes,
        in_process_nodes=in_process_nodes,
        in_process_tree_nodes=1 + config.in_process_tree_nodes
        if config.in_process_tree_nodes
        else 0,
        short_chain_nodes=1 + config.short_chain_tokens
        if in_process_nodes and config.short_chain_tokens
        else 0,
        has_features=features,
        has_sampled_acceptance=not config.simulated_acceptance,
        max_prefill_tokens=config.resolved_prefill_tokens,
        has_remote_distributions=remote_distributions,
    )
