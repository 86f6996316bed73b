"""Benchmarks that anyone can run: `outrider bench NAME` is `python -m outrider_bench NAME`.

__main__.py                Entry point `python -m outrider_bench NAME`, also reachable as `outrider
                           bench NAME`.
decoding_methods.py        `outrider bench local`: speculative decoding, plain decoding and
                           transformers, interleaved in one run.
environment.py             Description of the environment that is stored with every result: commit,
                           versions, machine, date.
long_prompts.py            Long prompts for `outrider bench serve --prompts`: distinct texts of a
                           stated number of tokens.
models.py                  Selection of models, head and processes in the benchmarks, with the flags
                           that they share.
prompts.py                 Prompts of the benchmarks, and detection of looping answers.
report.py                  Output of the benchmarks: progress on stderr, a table on stdout, and JSON
                           on request.
request_census.py          Modules and classes that take part in a request in a router, up to its
                           first text.
round_census.py            `outrider bench round-census`: how many modules and classes take part in
                           a round.
transformers_baseline.py   Baseline of plain decoding with transformers' `generate`.
"""
