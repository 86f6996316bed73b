"""Faults, links that are bad in a known way, and a checker of what clients heard meanwhile.

checker.py                 Histories against the texts of a calm run.
faults.py                  What can happen to whom, and when.
frame_faults.py            Drops, repeats, reorders and corrupts frames.
fuzz.py                    Frames that no honest peer sends, for every decoder.
fuzz_shm.py                Fuzzes the shared-memory channel.
history.py                 What one client heard, event by event.
load.py                    Clients of a running fleet, each asking again and again, and what they
                           heard.
network.py                 An in-process network of named processes whose links are delayed,
                           blocked, cut or mangled.
proxy.py                   A TCP proxy that is put between two processes, and whose link then goes
                           bad.
report.py                  What a run against a fleet has shown.
requests.py                Requests of a chaos run.
schedule.py                A seed as faults, requests and a fleet.
shrink.py                  The least of a schedule that still fails, found greedily.
signals.py                 Faults for processes of this machine, by their ids.
"""

from __future__ import annotations
