"""`outrider bench serve`: whole requests through a router, in every placement.

waves.py    what readers saw of a wave, and its figures
loads.py    which requests a wave has and when they start
cells.py    what is measured: drafts, sampling, sessions; the key of a cell
clients.py  the processes that send requests
fleet.py    the services of a placement, started here or already running
lab.py      how long a round takes where nothing but rounds is measured
measure.py  waves of a cell, one after the other
results.py  service.json: merged cells and what follows from them
picture.py  tokens/s over sessions as SVG
widened.py  a small model at a large one's cost, on disk
cli.py      flags
"""
