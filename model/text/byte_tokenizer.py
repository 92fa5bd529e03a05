"""A tokenizer with one token per byte of UTF-8, for random weights and tiny test models.

Ids 0 to 255 are the bytes, followed by four special tokens. Encoding never produces larger ids, but a random model
samples them, so each has a text (`` w300``).
"""

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from tightwire.model.checkpoint.errors import ModelError

BOS, EOS, START_OF_TURN, END_OF_TURN = "<|bos|>", "<|eos|>", "<|start|>", "<|end|>"
BOS_ID, EOS_ID, START_OF_TURN_ID, END_OF_TURN_ID = 256, 257, 258, 259
MIN_VOCAB_SIZE = 260

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|start|>' + message['role'] + '\n' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant\n' }}{% endif %}"
)


def byte_backend(vocab_size: int) -> Backend:
    """Return a ``tokenizers.Tokenizer`` with exactly ``vocab_size`` tokens.

    Raises ModelError: ``vocab_size`` is below 260, the number of bytes and special tokens.
    """
    if vocab_size < MIN_VOCAB_SIZE:
        raise ModelError(f"a byte tokenizer needs a vocab_size of at least {MIN_VOCAB_SIZE}, got {vocab_size}")
    characters = byte_characters()
    vocab = {characters[byte]: byte for byte in range(256)}
    special = (BOS, EOS, START_OF_TURN, END_OF_TURN)
    vocab.update({token: 256 + i for i, token in enumerate(special)})
    vocab.update({f"\u0120w{i}": i for i in range(MIN_VOCAB_SIZE, vocab_size)})
    backend = Backend(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    return backend


def byte_characters() -> list[str]:
    """Return the printable character for each byte in byte-level vocabularies (``bytes_to_unicode`` of openai/gpt-2)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    others = [byte for byte in range(256) if byte not in printable]  # U+0100 and up
    return [chr(256 + others.index(byte)) if byte in others else chr(byte) for byte in range(256)]
