"""Trains a byte-level BPE tokenizer on the run's documents, for a new model."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from tightwire.model.text.byte_tokenizer import BOS, CHAT_TEMPLATE, END_OF_TURN, EOS, START_OF_TURN, byte_characters
from tightwire.model.text.tokenizer import Tokenizer, tokenizer_from_folder

_SPECIAL = (BOS, EOS, START_OF_TURN, END_OF_TURN)
_MOST_CHARACTERS = 1 << 26  # of text to train on; more text changes little and takes minutes


def train_bpe(vocab_size: int, keep_in: Path, texts: Callable[[], Iterable[str]]) -> Tokenizer:
    """Load the tokenizer in ``keep_in``, or train one on ``texts()`` and save it there.

    Ids 0..3 are the special tokens of the byte tokenizer, so its chat template works here too. Raises ValueError: the size is too
    small, or there is too little text for it.
    """
    if vocab_size < len(_SPECIAL) + 256:
        raise ValueError(
            f"model.tokenizer: bpe:{vocab_size} is too small for bytes and special tokens; give bpe:{len(_SPECIAL) + 256} or more"
        )
    if not (keep_in / "tokenizer.json").is_file():
        learned = _learn(vocab_size, texts())
        if learned.get_vocab_size() < vocab_size:
            raise ValueError(
                f"model.tokenizer: the data gives {learned.get_vocab_size()} tokens, not {vocab_size}; use "
                f"bpe:{learned.get_vocab_size()}, or more data"
            )
        keep_in.mkdir(parents=True, exist_ok=True)
        with_template(learned).save(keep_in)
    ids = [_SPECIAL.index(token) for token in (EOS, END_OF_TURN)]
    return tokenizer_from_folder(keep_in, bos_token_id=_SPECIAL.index(BOS), eos_token_ids=tuple(ids))


def _learn(vocab_size: int, texts: Iterable[str]) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in _SPECIAL],
        initial_alphabet=byte_characters(),
        show_progress=False,
    )
    backend.train_from_iterator(_limit(texts), trainer)
    return backend


def _limit(texts: Iterable[str]) -> Iterator[str]:
    taken = 0
    for text in texts:
        yield text
        taken += len(text)
        if taken > _MOST_CHARACTERS:
            return


def with_template(backend: Backend) -> Tokenizer:
    """Add the byte tokenizer's chat template to a backend with the same special tokens, under any ids."""
    bos_id, *end_ids = (backend.token_to_id(token) for token in (BOS, EOS, END_OF_TURN))
    return Tokenizer(
        backend,
        chat_template=CHAT_TEMPLATE,
        special_tokens={"bos_token": BOS, "eos_token": EOS},
        bos_token_id=bos_id,
        eos_token_ids=tuple(token for token in end_ids if token is not None),
    )
