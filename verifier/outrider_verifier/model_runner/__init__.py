"""Runs rounds of the target model behind the ModelRunner protocol, on a CPU or a GPU. It may
import `state` and `exchange`.

batch.py                   Packs the rows of a round into one model batch.
cpu_runner.py              ModelRunner that runs the target model in the host's own loop.
grammar_preparation.py     Compiles structured-output grammars for sessions.
interface.py               ModelRunner protocol and its output classes.
kv_headroom.py             K/V slots that a round may write beyond the committed ones.
results.py                 Results of a finished round by row, and committing them to sessions.
swapped_sessions.py        K/V of preempted sessions that was swapped to host memory.
"""
