"""The asyncio side: RPCs, drafter and router streams, metrics, start-up. It may import everything.

drafter_connections.py     Connections of drafters: handshake, queues, flow control.
engine_builder.py          Builds the objects owned by the engine thread.
metrics.py                 Prometheus metrics of the verifier.
router_streams.py          Streams of routers: sessions opened on them and events sent back.
service.py                 VerifierService: the verifier's endpoint on the asyncio thread.
service_builder.py         Builds the service from a configuration and loads the model.
session_registry.py        Sessions of all routers by ticket.
session_spans.py           OpenTelemetry spans of traced sessions.
"""
