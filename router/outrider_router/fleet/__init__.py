"""Verifiers and drafters: discovery, health, drafter assignment, quarantine. It may import `base`.

compatibility.py           Compatibility checks between router, verifiers and drafters.
discovery.py               DNS discovery of peers: `dns:///HOST:PORT` stands for every address that
                           HOST resolves to.
drafter_assignment.py      Assignment of drafters to verifiers and to sessions.
drafter_commands.py        Control calls from the router to drafters: attach, detach, drain.
peers.py                   Peer records of the router: state of each verifier and drafter, and when
                           it is polled.
quarantine.py              Circuit breakers that quarantine slow, silent or faulty drafters.
registry.py                Registry of verifiers and drafters: polls them, attaches drafters and
                           reports lost peers.
"""
