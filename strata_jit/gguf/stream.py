"""Token ids to text as they come, in whole characters.

Owns `StreamDecoder`; knows of the tokenizer only its bytes and which tokens are no text.
"""

from __future__ import annotations

import codecs

from strata_jit.gguf.tokenizer import Tokenizer


class StreamDecoder:
    """Decodes one generation, token by token.

    A character whose bytes are spread over several tokens comes out with the last of them. Bytes that no
    further byte can make a character come out as U+FFFD as soon as that is certain. What is still incomplete
    at the end is dropped by `flush`, which therefore never makes up a U+FFFD.
    """

    __slots__ = ("_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """The text that is certain with this token, often "". Control and end tokens give ""."""
        if self._tokenizer.is_control(token_id):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """End the generation: what can still be shown, which is nothing; the decoder can be used anew."""
        self._decoder.reset()
        return ""
