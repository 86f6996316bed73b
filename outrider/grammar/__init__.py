"""Token constraints of sessions (grammars, allowed ids, bad words) and their allowed-token masks.

The package does not import torch. It imports `llguidance`, the grammar library, when the first
grammar is compiled.

compile_queue.py           Compile queue: compiles each grammar on a thread, and only once if
                           several requests wait for it.
compile_scheduler.py       Scheduler of grammar compilations: short first tries, and compilations
                           with the full limits.
compile_worker.py          Compile process: loads one tokenizer, then forks a process for each
                           grammar to compile.
compiler.py                Test-compiles grammars in child processes, so that no grammar can hang or
                           crash this process.
complexity.py              Complexity limits of grammar texts, checked before the grammar library
                           reads them.
constraint.py              Token constraints of sessions: allowed-token masks at a position and
                           along drafts.
digit_bound.py             Limit on the number of digits of numbers in JSON answers.
draft_masks.py             Allowed-token masks along the drafts of many sessions, computed together.
error_messages.py          Rewords error messages of the grammar library for clients.
grammar_cache.py           Grammar cache of one tokenizer: compiles each grammar once and keeps
                           those used most recently.
grammar_constraint.py      Grammar constraint: a session's position in its grammar, and the masks
                           there and along drafts.
json_numbers.py            Refuses JSON schemas with numbers that the grammar library cannot
                           represent exactly.
limits.py                  Cost limits of grammars: `CompileLimits` for compiling, `MaskLimits` for
                           computing masks.
mask_jobs.py               Mask computation on worker threads; a job that exceeds its time budget is
                           abandoned.
matcher_compiler.py        Compiles grammars into matchers with the grammar library (llguidance).
schema_recursion.py        Refuses JSON schemas with references that lead only to themselves.
socket_frames.py           Frames of bytes over a stream socket: four bytes of length, then the
                           content.
special_tokens.py          Hides the texts of special tokens from the grammar library.
thinking_limit.py          Thinking limit: counts the tokens of reasoning in an answer and forces
                           its close tag.
token_constraint.py        Token constraint of allowed ids, bad words and thinking, combined with a
                           grammar if there is one.
tool_calls.py              Grammars of tool calls in a model's own format, and of answers behind
                           reasoning.
"""
