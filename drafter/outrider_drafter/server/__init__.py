"""The process around it: verifier connections, the drafting thread, RPCs, start-up. It may import
everything.

build.py                   Builds the service from a configuration and loads the models.
draft_engine.py            DraftEngine: messages in, proposals out.
draft_loop.py              The drafting thread.
handshake.py               Handshake with a verifier.
service.py                 DrafterService: connections to verifiers and router RPCs.
session_spans.py           OpenTelemetry spans of traced sessions.
shm_channels.py            Shared-memory channels to verifiers on the same host.
"""
