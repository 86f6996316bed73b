"""Log-probabilities of tokens in the OpenAI formats of chat and completions. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.text.detokenizer import Detokenizer
from outrider.text.tokenizer import Tokenizer
from outrider.wire.inference import TokenLogprobs


class TokenTextTable:
    """Maps token ids to the text that they add to the output, or to their vocabulary name if they
    add none.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, special: bool = False, by_number: bool = False
    ) -> None:
        """Create the table. With `special`, special tokens are part of the output. With
        `by_number`, tokens are written as "token_id:N".
        """
        self._tokenizer, self._by_number = tokenizer, by_number
        self._pieces = tokenizer.special_pieces if special else tokenizer.pieces

    def raw_bytes(self, token_id: int) -> bytes:
        """Return the bytes that a token id adds to the text."""
        return self._pieces[token_id]

    def __call__(self, token_id: int) -> str:
        return f"token_id:{token_id}" if self._by_number else self.display_text(token_id)

    def display_text(self, token_id: int) -> str:
        """Return the text of a token id, with invalid UTF-8 replaced."""
        raw = self.raw_bytes(token_id)
        return raw.decode("utf-8", "replace") if raw else self._tokenizer.token_name(token_id)

    def offsets(self) -> TextOffsets:
        """Return a counter for the text offsets of an output's tokens."""
        return TextOffsets(Detokenizer(self._pieces))


class TextOffsets:
    """Counts the offsets in characters at which the tokens of one output begin in its text.

    A token begins where the text of the tokens before it ends. All tokens of one character begin
    where that character begins, and a token without text begins where the next token with text
    begins.
    """

    def __init__(self, detokenizer: Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._characters = 0

    def add_tokens(self, token_ids: Sequence[int]) -> list[int]:
        """Add the next tokens and return the offset of each."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._characters)
            self._characters += len(self._detokenizer.push_tokens((token_id,)))
        return offsets


def chat_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], texts: TokenTextTable
) -> dict[str, object]:
    """Return the `logprobs` object of a chat choice in OpenAI's format: `content` has an entry for
    each of these tokens, and `refusal` is None.
    """
    content = [
        {
            **_chat_token(id_, found.logprob, texts),
            "top_logprobs": [_chat_token(other, value, texts) for other, value in found.top],
        }
        for id_, found in zip(token_ids, logprobs, strict=True)
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, texts: TokenTextTable) -> dict[str, object]:
    return {"token": texts(token_id), "logprob": logprob, "bytes": list(texts.raw_bytes(token_id))}


def completion_logprobs(
    token_ids: Sequence[int],
    logprobs: Sequence[TokenLogprobs],
    texts: TokenTextTable,
    offsets: TextOffsets,
) -> dict[str, object]:
    """Return the `logprobs` object of a completion choice in OpenAI's format: `tokens`,
    `token_logprobs`, `top_logprobs` and `text_offset`, each a list with an entry for each of these
    tokens.

    `offsets` must have counted the choice's earlier tokens. The emitted token is among
    `top_logprobs`, as in OpenAI's API.
    """
    tokens = [texts(id_) for id_ in token_ids]
    top: list[dict[str, float]] = []
    for token, found in zip(tokens, logprobs, strict=True):
        others = {texts(id_): value for id_, value in reversed(found.top)}
        top.append({**dict(reversed(others.items())), token: found.logprob})
    return {
        "tokens": tokens,
        "token_logprobs": [found.logprob for found in logprobs],
        "top_logprobs": top,
        "text_offset": offsets.add_tokens(token_ids),
    }
