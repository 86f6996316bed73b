"""The asyncio side: RPCs, drafter and router streams, metrics, start-up. It may import everything.

drafter_connections.py     Exchange connections of drafters: handshakes, incoming proposals, bounded
                           outgoing queues.
engine_builder.py          Builds the objects that the engine thread owns.
metrics.py                 Prometheus metrics of a verifier, and the rolling medians that
                           `VerifierInfo` reports.
router_streams.py          Session streams of routers: sessions opened and closed, and one message
                           of events per round.
service.py                 VerifierService: the verifier as an endpoint of any transport.
service_builder.py         Loads the models and builds the service from a configuration.
session_spans.py           OpenTelemetry spans of traced sessions: one for the prompt, then one for
                           each sampled round.
"""
