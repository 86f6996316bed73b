"""The verifier process: it runs the target model and decides which draft tokens are accepted.

Arrows lead from a sub-package to those that it may import: state <- exchange <- model_runner <- kv,
planner <- engine <- server. All may import `config` and `hooks`.

__main__.py                Command line of the verifier process.
config.py                  Configuration of the verifier process: the fields of `VerifierConfig` are
                           its TOML keys.
hooks.py                   Hook points of a verifier process, for the modules that its setting
                           `hooks` lists.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
