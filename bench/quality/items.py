"""Task accuracy: cloze and multiple-choice items made from prose, code and chat, answered by every arm.

Two items of three are cloze: the model must give each token of the last word, which has occurred before, greedily. The third is
multiple choice: the true one of four continuations must be the likeliest; the others are from other places of the same text.
Texts are Python's own reference and source code, the same for a version of Python; no search for codecs uses them.
"""

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from torch import Tensor

from tightwire.model.text.tokenizer import Tokenizer

ROW_TOKENS = 48
NUM_CHOICES, CHOICE_TOKENS = 4, 12
_CONTEXT_WORDS, _NEAREST = 40, 4  # words before a cloze's word; how far back it must occur at least
_WORD = re.compile(r"\S+")
_MODULES = ("argparse", "difflib", "subprocess", "tarfile", "typing", "zipfile")
_TRIES_PER_ITEM = 2000


@dataclass(frozen=True, slots=True)
class TaskItem:
    """``rows_RL``: token ids of 1 row (cloze) or ``NUM_CHOICES``; the last ``num_asked`` of each row are judged."""

    source: str
    rows_RL: tuple[tuple[int, ...], ...]
    num_asked: int
    answer: int = 0  # the row with the true continuation

    def is_right(self, nll_R: Sequence[float], greedy_R: Sequence[bool]) -> bool:
        """Judge the answer from each row's negative log likelihood, and whether its tokens are the likeliest."""
        return greedy_R[0] if len(self.rows_RL) == 1 else int(np.argmin(nll_R)) == self.answer


def make_items(tokenizer: Tokenizer, count: int) -> list[TaskItem]:
    """Make ``count`` items, a third from each source. Raises ValueError if a source is too short for this tokenizer."""
    texts = _texts(tokenizer)
    return [_make_item(tokenizer, number, *list(texts.items())[number % len(texts)]) for number in range(count)]


def digest(items: Sequence[TaskItem]) -> str:
    """A name for this set of items."""
    return hashlib.sha256(repr([(item.rows_RL, item.answer) for item in items]).encode()).hexdigest()[:12]


def _make_item(tokenizer: Tokenizer, number: int, source: str, text: str) -> TaskItem:
    chance = random.Random(f"{source} {number}")
    first = tokenizer.encode("")
    make = _choice if number // 3 % 3 == 2 else _cloze
    for _ in range(_TRIES_PER_ITEM):
        if (item := make(tokenizer, chance, source, text, first)) is not None:
            return item
    raise ValueError(f"no item of {ROW_TOKENS} tokens could be made from the text of {source}; leave --items out")


def _cloze(tokenizer: Tokenizer, chance: random.Random, source: str, text: str, first: list[int]) -> TaskItem | None:
    start = chance.randrange(max(1, len(text) - 4000))
    words = list(_WORD.finditer(text, start, start + 4000))[1:]
    for place in range(_CONTEXT_WORDS, len(words)):
        word, before = words[place], [other[0] for other in words[place - _CONTEXT_WORDS : place]]
        if not (word[0].isalpha() and len(word[0]) >= 5) or word[0] not in before[:-_NEAREST]:
            continue
        begin = words[place - _CONTEXT_WORDS].start()
        context = tokenizer.encode(text[begin : words[place - 1].end()], add_special_tokens=False)
        ids = tokenizer.encode(text[begin : word.end()], add_special_tokens=False)
        num_asked, kept = len(ids) - len(context), ROW_TOKENS - len(first)
        if ids[: len(context)] == context and 1 <= num_asked <= CHOICE_TOKENS and len(ids) >= kept:
            return TaskItem(source, ((*first, *ids[-kept:]),), num_asked)
    return None


def _choice(tokenizer: Tokenizer, chance: random.Random, source: str, text: str, first: list[int]) -> TaskItem | None:
    kept = ROW_TOKENS - len(first)

    def passage() -> list[int]:
        start = text.find(" ", chance.randrange(max(1, len(text) - 2000)))
        return tokenizer.encode(text[start : start + 600], add_special_tokens=False)[:kept]

    passages = [passage() for _ in range(NUM_CHOICES)]
    ends = {tuple(ids[-CHOICE_TOKENS:]) for ids in passages}
    if any(len(ids) < kept for ids in passages) or len(ends) < NUM_CHOICES:
        return None
    context, true_end = passages[0][:-CHOICE_TOKENS], tuple(passages[0][-CHOICE_TOKENS:])
    choices = sorted(ends)
    return TaskItem(source, tuple((*first, *context, *end) for end in choices), CHOICE_TOKENS, choices.index(true_end))


def _texts(tokenizer: Tokenizer) -> dict[str, str]:
    answers = list(topics.items())
    code = []
    for module in _MODULES:
        spec = find_spec(module)
        if spec is not None and spec.origin is not None:
            code.append(Path(spec.origin).read_text(encoding="utf-8"))
    chats = []
    for title, answer in answers[1::2]:
        question = f"What does the Python reference say about {title}?"
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        if tokenizer.chat_template is not None:
            chats.append(tokenizer.render_chat(messages, add_generation_prompt=False))
        else:
            chats.append(f"User: {question}\nAssistant: {answer}")
    return {"prose": "\n".join(text for _, text in answers[::2]), "code": "\n".join(code), "chat": "\n".join(chats)}


def batches(items: Sequence[TaskItem], num_rows: int) -> Iterator[tuple[list[TaskItem], Tensor]]:
    """Items with their rows, (R, ROW_TOKENS): as many as fit into ``num_rows``, but at least one."""
    groups: list[list[TaskItem]] = [[]]
    for item in items:
        if groups[-1] and sum(len(each.rows_RL) for each in (*groups[-1], item)) > num_rows:
            groups.append([])
        groups[-1].append(item)
    for group in filter(None, groups):
        yield group, torch.tensor([row for item in group for row in item.rows_RL])


@torch.inference_mode()
def judge(batch: Sequence[TaskItem], rows_RL: Tensor, hidden_RLD: Tensor, head_VD: Tensor) -> list[bool]:
    """Whether each item is answered rightly; ``hidden_RLD``: final hidden states of its rows."""
    right, at = [], 0
    for item in batch:
        asked, num_rows = item.num_asked, len(item.rows_RL)
        states_RAD = hidden_RLD[at : at + num_rows, -asked - 1 : -1].float()
        ids_RA = rows_RL[at : at + num_rows, -asked:]
        log_p_RAV = (states_RAD @ head_VD.T).log_softmax(-1)
        nll_R = -log_p_RAV.gather(2, ids_RA.unsqueeze(2)).squeeze(2).sum(1)
        greedy_R = (log_p_RAV.argmax(2) == ids_RA).all(1)
        right.append(item.is_right(nll_R.tolist(), greedy_R.tolist()))
        at += num_rows
    return right


def accuracy(right: Sequence[bool]) -> tuple[float, float]:
    """The share of right answers, and half of its 95 % interval (Wilson, 1927)."""
    count, share, z = len(right), sum(right) / len(right), 1.96
    variance = share * (1 - share) / count + z * z / (4 * count * count)
    return share, z * variance**0.5 / (1 + z * z / count)
