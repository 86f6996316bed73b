"""The drafter process: it keeps draft models beside a verifier's sessions and proposes draft
trees. Arrows of imports: state <- proposers <- gpu, look_ahead <- server; `config` and
`metrics` are open to all.

    __main__.py                Command line of the drafter process.
    config.py                  Configuration of the drafter process.
    connections.py
    device_laws.py
    metrics.py                 Prometheus metrics of the drafter.
    relay.py
    slow_link.py
    slow_source.py
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
