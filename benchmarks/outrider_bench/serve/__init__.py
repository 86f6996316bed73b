"""`outrider bench serve`: whole requests through a router, in every placement.

cells.py                   What a cell is.
chart.py                   Draws the chart of results.
cli.py                     `outrider bench serve`.
clients.py                 The processes that send requests and read the answers, enough of them not
                           to be the limit.
fleet.py                   The services behind a table.
measurement.py             Measures the waves of a cell.
pipeline.py                `outrider bench pipeline`.
results.py                 service.json.
round_baseline.py          Round times without serving, the baseline of efficiency.
run.py                     One run.
waves.py                   What the readers of one wave of requests saw, and the figures of it.
widened_model.py           Writes a widened model once and reuses it.
workload.py                Requests of a wave and their arrival times.
"""
