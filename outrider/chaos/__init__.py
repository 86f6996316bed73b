"""Faults, links that are bad in a known way, and a checker of what clients heard meanwhile.

faults.py    what can happen to whom, and when
asks.py      the requests of a run and how their clients behave
schedule.py  a seed as faults, requests and a fleet
shrink.py    the least of a schedule that still fails
history.py   what one client heard, event by event
checker.py   histories against the texts of a calm run
network.py   an in-process network whose links are delayed, blocked, cut or mangled
mangling.py  frames that are lost, doubled, swapped, changed or cut short
proxy.py     the same for real sockets: a TCP proxy between two processes
fuzz.py      frames that no honest peer sends, for every decoder
fuzz_lane.py packets that no honest peer puts into a lane
signals.py   faults for processes by their ids
load.py      clients of a running fleet
report.py    what a run against a fleet has shown
"""

from __future__ import annotations
