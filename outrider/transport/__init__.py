"""Transports between the processes: in process, gRPC, shared memory and Ray, behind one interface.
This package may import `wire`.

bounded_queue.py           Bounded asyncio queue that can be closed with an error.
error_codec.py             Serialisation of errors: every transport delivers an error with its type
                           and details.
framed_connection.py       Connections over frames: batching, encoding and decoding shared by all
                           transports.
heartbeat.py               Application heartbeats: they detect a peer whose event loop hangs, over
                           every transport.
in_process.py              In-process transport: endpoints and dialers that share one event loop.
interface.py               Transport interfaces: connections, control clients, endpoints and dialers
                           between processes.
pollable_queue.py          Queue whose consumer thread waits for items and sockets at the same time.
send_queue.py              Ordered send queue of a connection, for code that cannot wait.
session_stream.py          Client of a verifier's session stream, with a listener or an iterator for
                           each session.
tls.py                     TLS configuration and certificate roles of all processes, independent of
                           gRPC.
"""
