"""The verifier process: it runs the target model and decides which draft tokens are accepted.
Arrows of imports: state <- exchange <- model_runner <- kv, planner <- engine <- server;
`config` is open to all, `__main__` is the command line.

__main__.py                Command line of the verifier process.
config.py                  Configuration of the verifier process.
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
