"""Server of the drafter: verifier connections, the drafting thread, RPCs and start-up. This
package may import all other packages of the drafter.

build.py                   Builds the service from a configuration: loads all draft models (torch is
                           imported here).
draft_engine.py            DraftEngine: turns messages into proposals, without threads, I/O or a
                           clock of its own.
draft_loop.py              The drafting thread: the only one that accesses sessions and models.
handshake.py               Handshake with a verifier: hello, welcome, and a shared-memory channel on
                           the same host.
service.py                 DrafterService: connections to verifiers, and the calls of routers.
session_spans.py           OpenTelemetry spans of traced sessions, with a sample of their drafts.
shm_channels.py            Shared-memory channels to verifiers on the same host, read and written by
                           the drafting thread.
"""
