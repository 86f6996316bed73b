"""Structured output: grammars over token ids and the masks that they give.

    grammars    schemas, expressions and grammars, compiled once each for one tokenizer
    constraint  where one session is in its grammar; masks for it and for its drafts

No torch; `llguidance` is imported when the first grammar is compiled.
"""
