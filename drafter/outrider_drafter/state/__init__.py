"""Sessions that a drafter follows, their features, and outcomes of proposals. It imports no other
package of the drafter.

fair_share.py              Fair sharing of drafting time between verifiers.
feature_buffer.py          Received features that were not used yet.
outcomes.py                Outcomes (accepted path, next token) of proposals, ranked by expected
                           gain.
session.py                 Session: what a drafter knows of one session.
session_grammars.py        Grammar constraints of sessions, compiled in the background.
session_table.py           SessionTable: all followed sessions in columns; applies verdicts.
"""
