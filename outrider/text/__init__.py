"""Text on the router's side: tokenizing, chat templates, incremental detokenizing, stop strings.

chat.py                    Chat templates: sandboxed jinja2, with the helpers that published
                           templates rely on.
detokenizer.py             Incremental detokenizer: token ids in, whole characters out.
generation_block.py        Jinja extension for the `{% generation %}` block of chat templates.
plain_text_chat.py         Chat rendering with messages as plain text: only the template writes
                           special tokens.
special_tokens.py          Private names for a tokenizer's special tokens, which no client text can
                           contain.
stop_strings.py            Stop-string filter for streamed text.
token_bytes.py             Table of the bytes that each token id contributes to the text.
tokenizer.py               Tokenizer of a served model, loaded from its files in the hub's layout
                           (torch-free).
"""
