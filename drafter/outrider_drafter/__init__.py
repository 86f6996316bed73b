"""The drafter process: it keeps draft models beside a verifier's sessions and proposes draft
trees. Arrows of imports: state <- proposers <- gpu, look_ahead <- server; `config` and
`metrics` are open to all.

__main__.py                Command line of the drafter process.
config.py                  Configuration of the drafter process.
metrics.py                 Prometheus metrics of the drafter.
relay.py                   A slow link, for benchmarks: `python -m outrider_drafter.relay DELAY_MS`.
slow_link.py               A drafter behind a slow link, for benchmarks: its dialer and its lanes go
                           through a relay.
slow_source.py             A drafter of a slower device, for benchmarks: every draft takes several
                           times as long.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
