"""Text processing in the router: tokenizer, chat templates, incremental detokenizer, stop strings.

chat.py                    Chat templates: sandboxed jinja2, with the helpers that published
                           templates rely on.
detokenizer.py             Incremental detokenizer: converts token ids to text, in whole characters.
generation_block.py        Jinja extension for the `{% generation %}` block of chat templates.
model_chat.py              Chat templates of a model: the usual one, and one for requests with
                           tools.
plain_text_chat.py         Chat rendering in which messages are plain text, and only the template
                           writes special tokens.
special_tokens.py          Private names for the special tokens of a tokenizer.
stop_strings.py            Stop-string filter for streamed text.
template_traits.py         Traits of chat templates: in which form they read tools, tool calls and
                           reasoning.
token_bytes.py             Table of the bytes that each token id contributes to the text.
tokenizer.py               Tokenizer of a served model, loaded from files in the layout of the
                           Hugging Face Hub.
"""
