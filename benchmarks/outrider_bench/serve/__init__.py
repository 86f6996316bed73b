"""`outrider bench serve`: whole requests through a router, in every placement.

cells.py                   Cells of the serving benchmark: all settings of one measurement, such as
                           drafts, sampling and load.
chart.py                   Chart of tokens/s by number of sessions: one line per placement and draft
                           setting.
cli.py                     `outrider bench serve`: whole requests through the router, in every
                           placement.
clients.py                 Client processes that send requests and read answers, enough of them not
                           to be the bottleneck.
fleet.py                   Services of one placement: they are started, or those behind a running
                           router are used.
measurement.py             Measurement of a cell in consecutive waves, from the first (cold) to the
                           last (steady).
pipeline.py                `outrider bench pipeline`: gain of look-ahead, from cells of `outrider
                           bench serve`.
results.py                 Results file service.json: cells of several runs and machines, and
                           derived figures.
round_baseline.py          Round times without serving overhead, the baseline of serving efficiency.
run.py                     One run of the serving benchmark: services to start, cells to measure,
                           and cells left out.
wave_metrics.py            Metrics of a wave, which is one batch of benchmark requests: tokens/s,
                           latencies, acceptance.
widened_model.py           Widened model of the serving benchmark: written to disk once, then
                           reused.
workload.py                Requests of a wave, and their arrival times in an open loop.
"""
