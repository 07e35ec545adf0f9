"""Text to token ids: bytes, or a tokenizer.json as Hugging Face's `tokenizers` library writes it. Never torch.

A document longer than PIECE_BYTES is cut into pieces (`cut_point`) before it is encoded, so that memory stays bounded
whatever the length of a text. The cuts depend on the text alone: the same document gives the same tokens in whichever
file, and with any number of workers, it comes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from hp_train.data.token_folder import BYTE_VOCABULARY, Vocabulary
from hp_train.errors import ConfigError

PIECE_BYTES = 1 << 20

# What the vocabularies in use call these tokens, the most specific first.
_BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<|startoftext|>")
_EOS_NAMES = ("<|end_of_text|>", "<|endoftext|>", "</s>", "<eos>", "[EOS]")
_PAD_NAMES = ("<|finetune_right_pad_id|>", "<pad>", "[PAD]", "<|pad|>")


class Tokenizer(Protocol):
    """Encodes pieces of text, adding no special tokens, and decodes ids."""

    vocabulary: Vocabulary

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """Token ids of each piece of UTF-8 text."""
        ...

    def encode_prompt(self, text: str, *, special_tokens: bool) -> list[int]:
        """Token ids of a text to go on from, with what the tokenizer puts in front of it if `special_tokens`."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids` without special tokens; bytes that are no UTF-8 become U+FFFD."""
        ...


class ByteTokenizer:
    """The bytes of UTF-8 text are the ids."""

    vocabulary = BYTE_VOCABULARY

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """See `Tokenizer`."""
        return [np.frombuffer(piece, dtype=np.uint8).astype(np.uint32) for piece in pieces]

    def encode_prompt(self, text: str, *, special_tokens: bool) -> list[int]:
        """See `Tokenizer`; nothing is put in front."""
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return bytes(token for token in ids if token < 256).decode("utf-8", errors="replace")


class FileTokenizer:
    """A tokenizer read from a tokenizer.json. Raises ConfigError if the file cannot be read or is none.

    `setting` is what to call it in errors.
    """

    def __init__(self, path: str, setting: str = "--tokenizer") -> None:
        if not path:
            raise ConfigError(f"{setting} is empty; use byte or a tokenizer.json")
        import tokenizers  # 30 ms, and not needed for bytes

        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(
                f"{setting} {path} cannot be read ({error.strerror}); use byte or a tokenizer.json"
            ) from None
        try:
            self._tokenizer = tokenizers.Tokenizer.from_buffer(data)
        except Exception as error:  # the library raises bare Exception for whatever is wrong in the file
            reason = " ".join(str(error).split())
            raise ConfigError(f"{setting} {path} is no tokenizer.json ({reason})") from None
        self._tokenizer.no_truncation()  # both may be set in the file, for inference
        self._tokenizer.no_padding()
        ids = self._tokenizer.get_vocab(with_added_tokens=True)
        if not ids:
            raise ConfigError(f"{setting} {path} has no tokens")
        self.vocabulary = Vocabulary(
            tokenizer=Path(path).name,
            sha256=hashlib.sha256(data).hexdigest(),
            size=max(ids.values()) + 1,  # ids may have gaps
            bos_id=_first_id(ids, _BOS_NAMES),
            eos_id=_first_id(ids, _EOS_NAMES),
            pad_id=_first_id(ids, _PAD_NAMES),
        )

    def encode(self, pieces: Sequence[bytes]) -> list[NDArray[np.uint32]]:
        """See `Tokenizer`."""
        texts = [piece.decode("utf-8") for piece in pieces]
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]

    def encode_prompt(self, text: str, *, special_tokens: bool) -> list[int]:
        """See `Tokenizer`."""
        return self._tokenizer.encode(text, add_special_tokens=special_tokens).ids

    def decode(self, ids: Sequence[int]) -> str:
        """See `Tokenizer`."""
        return self._tokenizer.decode(list(ids), skip_special_tokens=True)

    def token(self, token_id: int) -> str:
        """The token of an id that is in the vocabulary."""
        return self._tokenizer.id_to_token(token_id)

    def token_id(self, token: str) -> int | None:
        """Id of `token` as spelt in the vocabulary, None if it has none."""
        return self._tokenizer.token_to_id(token)


def open_tokenizer(name: str, setting: str = "--tokenizer") -> ByteTokenizer | FileTokenizer:
    """The tokenizer called `name`: `byte`, or the path of a tokenizer.json. `setting` is what to call it in errors."""
    return ByteTokenizer() if name == "byte" else FileTokenizer(name, setting)


def cut_point(text: bytes) -> int:
    """Where to end the first piece of `text`, which is UTF-8 longer than PIECE_BYTES.

    After the last line end within PIECE_BYTES, else before the last blank (word pieces carry the blank in front), else
    between two characters.
    """
    assert len(text) > PIECE_BYTES
    if (newline := text.rfind(b"\n", 0, PIECE_BYTES)) >= 0:
        return newline + 1
    if (blank := text.rfind(b" ", 1, PIECE_BYTES)) >= 0:
        return blank
    end = PIECE_BYTES
    while end > PIECE_BYTES - 4 and text[end] & 0xC0 == 0x80:  # a continuation byte belongs to the character before it
        end -= 1
    return end


def cut_into_pieces(text: bytes) -> list[bytes]:
    """All pieces of one document; joined they are the document."""
    pieces = []
    while len(text) > PIECE_BYTES:
        end = cut_point(text)
        pieces.append(text[:end])
        text = text[end:]
    return [*pieces, text]


def _first_id(ids: dict[str, int], names: Sequence[str]) -> int | None:
    return next((ids[name] for name in names if name in ids), None)
