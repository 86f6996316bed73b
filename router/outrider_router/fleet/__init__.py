"""Verifiers and drafters: discovery, health, drafter assignment, quarantine. It may import `base`.

compatibility.py           Checks which drafters and verifiers fit together.
discovery.py               DNS discovery of peers.
drafter_assignment.py      Pure: which drafter serves which session.
drafter_commands.py        Control calls to drafters: attach, detach, drain.
peers.py                   Polls peers and holds what the router knows of them.
quarantine.py              Circuit breakers that remove slow or faulty drafters for a while.
quarantine_manager.py      Applies the quarantine and reports its changes.
registry.py                Registry of verifiers and drafters.
"""
