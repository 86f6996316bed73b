"""The drafter process: it keeps draft models beside a verifier's sessions and proposes draft
trees. Arrows of imports: state <- proposers <- gpu, look_ahead <- server; `config` and
`metrics` are open to all, `hooks` is what the server and an operator's modules share.

__main__.py                Command line of the drafter process.
config.py                  Configuration of the drafter process: the fields of `DrafterConfig` are
                           its TOML keys.
hooks.py                   Hook points of a drafter process, for the modules that its setting
                           `hooks` names.
metrics.py                 Prometheus metrics of a drafter, and the figures of `DrafterInfo`.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
