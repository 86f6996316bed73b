"""The drafter process: it keeps draft models beside a verifier's sessions and proposes draft
trees. Arrows of imports: state <- proposers <- gpu, look_ahead <- server; `config` and
`metrics` are open to all, `hooks` is what the server and an operator's modules share.

    __main__.py                Command line of the drafter process.
    config.py                  Configuration of the drafter process.
    connections.py
    device_laws.py
    hooks.py                   Hook points of the drafter process.
    metrics.py                 Prometheus metrics of the drafter.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
