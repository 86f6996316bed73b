"""What sessions may emit: grammars over token ids, limits of ids, and the masks that they give.

    complexity       bounds on the text of a grammar, checked before the library reads it
    special_tokens   hides special tokens from the library: literals are text
    library          the library's calls that compile, the same in every process
    compiler         tries grammars out in processes of their own (compile_worker, frames)
    compile_queue    requests that wait for grammars share their compiling, and can leave
    compile_lanes    whose turn it is: short first tries of all, full compiles of few
    grammars         schemas, expressions and grammars, compiled once each for one tokenizer
    limits           settings that bound compiling and masks
    mask_jobs        masks that may take long: on threads, with budgets
    digits           bounds the digits of numbers in JSON
    constraint       what a session may emit; masks for it and for its drafts
    walks            along drafts of many sessions, all masks of a step at once
    form_constraint  the same of a session in a grammar
    id_constraint    the same of a session with allowed ids or bad words, in a grammar or not

No torch; `llguidance` is imported when the first grammar is compiled.

compile_queue.py           Grammars that requests wait for: compiled on threads, shared by all that
                           wait for one.
compile_scheduler.py       The order in which grammars are compiled: short first tries of all, and
                           full compiles of few.
compile_worker.py          The compile process: it loads one tokenizer, then forks a process for
                           each grammar to compile.
compiler.py                Tries out grammars in processes of their own, so that none can stop or
                           kill this process.
complexity.py              Bounds on the text of a grammar, checked before the grammar library reads
                           it (pure).
constraint.py              Which ids may follow where a session is, and at every node of a draft.
digit_bound.py             Bounds the digits of numbers in JSON answers, as their white space is
                           bounded.
draft_masks.py             Allowed-token masks along drafts of many sessions.
error_messages.py          The grammar library's reasons in plain words.
grammar_cache.py           Compiles and caches grammars.
grammar_constraint.py      Token constraint of a compiled grammar.
json_numbers.py            Checks the numbers of a JSON schema that the grammar library cannot hold
                           exactly (pure).
limits.py                  Settings that bound what a grammar may cost: to compile it, and to
                           compute its masks.
mask_jobs.py               Masks of single matchers on threads of their own, which may be given up
                           while they compute.
matcher_compiler.py        Calls of the grammar library that compile: its tokenizer, its source
                           text, its limits.
socket_frames.py           Frames of bytes over a stream socket: four bytes of length, then the
                           content.
special_tokens.py          Hides the texts of special tokens from the grammar library (pure).
token_constraint.py        Token constraint of allowed ids and bad words.
"""
