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
"""
