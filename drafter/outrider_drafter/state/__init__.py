"""Sessions that a drafter follows, their features, and outcomes of proposals. This package
imports no other package of the drafter.

fair_share.py              Shares a drafter fairly between its verifiers: message intake and
                           drafting take turns.
feature_buffer.py          Buffer of received features, which stay in their messages until a
                           proposer consumes them.
outcomes.py                Outcomes (accepted path, next token) of proposals, ranked by expected
                           gain.
session.py                 FollowedSession, a drafter's state of one session, and the checks of its
                           announcement.
session_grammars.py        Token constraints of sessions on a drafter; grammars are compiled in the
                           background.
session_table.py           SessionTable: all followed sessions as arrays, to which verdict messages
                           are applied.
"""
