"""The drafter process: it follows the sessions of verifiers and proposes draft trees for them.

Arrows lead from a sub-package to those that it may import: state <- proposers <- gpu, look_ahead <-
server. All may import `config` and `metrics`. The server and an operator's modules use `hooks`.

__main__.py                Command line of the drafter process.
config.py                  Configuration of the drafter process: the fields of `DrafterConfig` are
                           its TOML keys.
hooks.py                   Hook points of a drafter process, for the modules that its setting
                           `hooks` names.
metrics.py                 Prometheus metrics of a drafter, and the statistics in `DrafterInfo`.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
