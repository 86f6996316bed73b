"""The asyncio side: RPCs, drafter and router streams, metrics, start-up. It may import everything.

drafter_connections.py     Exchange connections of drafters: handshakes, incoming proposals, bounded
                           outgoing queues.
engine_builder.py          Builds the objects owned by the engine thread.
metrics.py                 Prometheus metrics of a verifier, and the rolling medians that
                           `VerifierInfo` reports.
router_streams.py          Session streams of routers: sessions opened and closed, and one message
                           of events per round.
service.py                 VerifierService: the verifier as an endpoint of any transport; asyncio
                           thread only.
service_builder.py         Builds the service from a configuration and loads the model; imports
                           torch.
session_spans.py           OpenTelemetry spans of traced sessions: the prompt, then a sample of the
                           rounds.
"""
