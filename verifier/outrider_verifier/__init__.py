"""The verifier process: it runs the target model and decides which draft tokens are accepted.
Arrows of imports: state <- exchange <- model_runner <- kv, planner <- engine <- server;
`config` and `hooks` are open to all, `__main__` is the command line.

__main__.py                Command line of the verifier process.
config.py                  Configuration of the verifier process: the fields of `VerifierConfig` are
                           its TOML keys.
hooks.py                   Hook points of a verifier process, for the modules that its setting
                           `hooks` names.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
