"""Constraints of sessions: grammars over token ids, allowed and banned ids, and their masks.

No torch; `llguidance` is imported when the first grammar is compiled.

compile_queue.py           Compile queue: compiles grammars on threads, once for all requests that
                           wait for the same one.
compile_scheduler.py       Order of grammar compiles: short first tries for all, full compiles for
                           few.
compile_worker.py          Compile process: loads one tokenizer, then forks a process for each
                           grammar to compile.
compiler.py                Test-compiles grammars in child processes, so that no grammar can hang or
                           crash this process.
complexity.py              Complexity limits of grammar texts, checked before the grammar library
                           reads them.
constraint.py              Token constraints of sessions: allowed-token masks at a position and
                           along drafts.
digit_bound.py             Digit limit of numbers in JSON answers, similar to the limit on their
                           white space.
draft_masks.py             Allowed-token masks along the drafts of many sessions, computed together.
error_messages.py          Rewords error messages of the grammar library for clients.
grammar_cache.py           Grammar cache of one tokenizer: compiles each grammar once and keeps it
                           while it is used.
grammar_constraint.py      Grammar constraint: a session's state in its grammar, and the masks there
                           and along a draft.
json_numbers.py            Refuses JSON schemas with numbers that the grammar library cannot hold
                           exactly.
limits.py                  Cost limits of grammars: `CompileLimits` for compiling, `MaskLimits` for
                           computing masks.
mask_jobs.py               Mask computation on worker threads; a job that exceeds its time budget is
                           abandoned.
matcher_compiler.py        Compiles matchers with the grammar library, from its tokenizer, source
                           text and limits.
socket_frames.py           Frames of bytes over a stream socket: four bytes of length, then the
                           content.
special_tokens.py          Hides the texts of special tokens from the grammar library.
token_constraint.py        Token constraint of allowed ids and bad words, combined with a grammar if
                           there is one.
"""
