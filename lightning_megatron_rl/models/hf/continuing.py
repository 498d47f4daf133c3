"""Token ids of text that goes on from other text, whatever the tokenizer does where a text begins."""

from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ANCHOR = "\n"  # text that no tokenizer joins with a letter behind it


def continuing_ids(tokenizer: "PreTrainedTokenizerBase", text: str, before: str) -> list[int]:
    """Token ids of text that follows other text, whose tokens stay as they are.

    Tokenizers after SentencePiece's manner (Llama 2, Mistral, Mixtral) put a space before every text that they encode.
    Here it is only where they put it within a text, which some of them do behind a special token.
    """
    ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if not puts_space_first(tokenizer):
        return ids
    ends = [token for token in tokenizer.get_added_vocab() if token and before.endswith(token)]
    anchor = max(ends, key=len, default=_ANCHOR)
    head: list[int] = tokenizer(anchor, add_special_tokens=False)["input_ids"]
    both: list[int] = tokenizer(anchor + text, add_special_tokens=False)["input_ids"]
    return both[len(head) :] if both[: len(head)] == head else ids


@lru_cache(maxsize=8)
def puts_space_first(tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether the tokenizer encodes a text otherwise where it begins than where it follows other text."""
    head, tail, both = (
        tokenizer(text, add_special_tokens=False)["input_ids"] for text in (_ANCHOR, "a", f"{_ANCHOR}a")
    )
    return bool(head + tail != both)
