"""How many bytes of text each token stands for: turns a loss per token into bits per byte."""

from __future__ import annotations

import json
import re

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, pre_tokenizers

_SPACE = "\u2581"  # SentencePiece writes a space as this
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


def token_bytes(tokenizer: Tokenizer) -> npt.NDArray[np.int32]:
    """int32 [vocab]: UTF-8 bytes of each token, 0 for special tokens and unused ids.

    Exact for byte-level tokenizers without a normalizer. For others (SentencePiece, WordPiece) it
    is the length of what a token looks like; the manifest holds the factor that corrects the sum.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    added = tokenizer.get_added_tokens_decoder()
    described = json.loads(tokenizer.to_str())
    parts = json.dumps([described["pre_tokenizer"], described["decoder"]])
    byte_level = '"ByteLevel"' in parts
    alphabet = set(pre_tokenizers.ByteLevel.alphabet())
    sizes = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    for token, index in vocabulary.items():
        if index in added:
            sizes[index] = 0 if added[index].special else len(token.encode())
        elif byte_level and alphabet.issuperset(token):
            sizes[index] = len(token)  # one character of the alphabet is one byte
        elif _BYTE.fullmatch(token):
            sizes[index] = 1
        else:
            sizes[index] = len(token.removeprefix("##").replace(_SPACE, " ").encode())
    return sizes
