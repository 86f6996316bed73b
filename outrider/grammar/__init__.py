"""What sessions may emit: grammars over token ids, limits of ids, and the masks that they give.

    grammars         schemas, expressions and grammars, compiled once each for one tokenizer
    constraint       what a session may emit; masks for it and for its drafts
    walks            along drafts of many sessions, all masks of a step at once
    form_constraint  the same of a session in a grammar
    id_constraint    the same of a session with allowed ids or bad words, in a grammar or not

No torch; `llguidance` is imported when the first grammar is compiled.
"""
