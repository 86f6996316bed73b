"""Definitions that drafter, verifier and router share: digests, trees, distributions, noise, plans
and sampling.

The package uses numpy only and imports no other package of Outrider.

decoding_mode.py           Decoding mode of a workload class (plain or speculative), and the reason
                           for it.
digest.py                  Prefix digests: a 64-bit hash chain over token ids that content-
                           addresses a committed prefix.
draft_distribution.py      Draft distributions: the exact, quantised distributions that draft
                           tokens were drawn from.
exchange_mode.py           Setting of the device exchange, which passes drafts and features through
                           GPU memory: auto, on or off.
mix64.py                   64-bit mixing function (mix64) for prefix digests and noise.
noise.py                   Counter-based noise: a pure function of (seed, stream, absolute
                           position, token id).
plan.py                    Speculation plan of a session: draft method, tree shape and look-ahead
                           (torch-free).
sampling.py                Sampling parameters and acceptance rules of a session (torch-free).
speculation_summary.py     Text in which a verifier reports the choices of its speculation
                           controller, and its parser.
structured_output.py       Structured-output constraint of a request: kind and text of its grammar
                           (torch-free).
thinking_budget.py         Thinking budget of a session: how many tokens of reasoning its answer may
                           have (torch-free).
token_limits.py            Token limits of a request: allowed ids and bad words (torch-free).
tools.py                   Tools and tool calls of chat requests and answers.
tree.py                    Draft trees as parallel arrays, and the validation that every received
                           tree must pass.
"""
