"""The verifier process: it runs the target model and decides which draft tokens are accepted.
Arrows of imports: state <- exchange <- model_runner <- kv, planner <- engine <- server;
`config` and `hooks` are open to all, `__main__` is the command line.

    __main__.py                Command line of the verifier process.
    config.py                  Configuration of the verifier process.
    hooks.py                   Hook points of the verifier process.
    form_chains.py
    form_trees.py
    glances.py
    observing.py
    openings.py
    prompt_chunks.py
    rows.py
    shares.py
"""

from outrider.build_info import require_one_build

require_one_build(__file__)
