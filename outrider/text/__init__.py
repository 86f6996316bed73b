"""Text on the router's side: tokenizing, chat templates, incremental detokenizing, stop strings.

chat.py                    Chat templates.
detokenizer.py             Incremental detokenizing.
generation_block.py        The `{% generation %}` block of chat templates.
plain_text_chat.py         Conversations whose messages are plain text: only the chat template
                           writes special tokens.
special_tokens.py          Special tokens of a tokenizer under private names, which no text of a
                           client can contain.
stop_strings.py            Stop strings in streamed text.
token_bytes.py             Bytes that each token id contributes to the text.
tokenizer.py               The tokenizer of a served model, from the files that the hub lays out
                           (torch-free).
"""
