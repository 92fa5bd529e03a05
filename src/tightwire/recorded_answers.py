"""A model's answers with its most likely tokens at each of their places, recorded once in files for another model to learn from.

Each file of JSON lines has the answers to ``_AT_ONCE`` prompts: ``prompt`` and ``answer`` to read, ``tokens`` of both together,
``num_answered`` of them the answer's, and ``place`` of its first token. Beside it lies a ``.npz`` of a row for each place. Ranks record
together; a file is complete when it is there, so a stopped recording goes on, and its answers do not depend on the number of ranks.
"""

import io
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from tightwire.whole_folder import write_atomic

_AT_ONCE = 256  # prompts of a file
_SETTINGS = "settings.json"

Prompt = tuple[list[int], Sequence[Mapping[str, Any]]]  # its tokens, up to where the answer begins, and its messages
# One answer to each (tokens, seed): most tokens, temperature, and number of most likely tokens to keep.
Ask = Callable[[Sequence[tuple[list[int], int]], int, float, int], Sequence[Any]]


class Ranks(Protocol):
    """Who records together."""

    rank: int
    world_size: int

    def gather(self, value: Any) -> list[Any]:
        """The values of all ranks, in rank order."""
        ...


class Recorded(NamedTuple):
    """(P, K) by place: the most likely tokens, and the natural logarithms of their probabilities at temperature 1."""

    ids_PK: np.ndarray
    logs_PK: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Recording:
    """What is recorded in ``folder``. ``settings``: what the answers depend on, as JSON; a folder of others is refused.

    ``first_question``: the tokens of a chat up to where its user begins. ``num_questions``: prompts that the model then asks itself.
    """

    folder: Path
    settings: Mapping[str, Any]
    prompts: Sequence[Prompt]
    num_questions: int
    first_question: list[int]
    question_tokens: int
    to_prompt: Callable[[str], Prompt | None]  # of a question; None: it is too long
    decode: Callable[[Sequence[int]], str]
    answer_tokens: int
    temperature: float
    top: int
    seed: int

    @property
    def num_prompts(self) -> int:
        return len(self.prompts) + self.num_questions

    def files(self) -> list[Path]:
        """The files of all answers, those too that are not there yet."""
        return [self.folder / f"{number:05}.jsonl" for number in range(-(-self.num_prompts // _AT_ONCE))]

    def check(self) -> None:
        """Create the folder. Raises ValueError: it has answers of other settings, or cannot be written."""
        path, text = self.folder / _SETTINGS, json.dumps(self.settings, indent=1, sort_keys=True) + "\n"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            if not path.exists():
                return write_atomic(path, text.encode())
            there = dict(json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(f"the answers in {self.folder} cannot be written or read: {error}") from None
        if unlike := [key for key in self.settings if there.get(key) != self.settings[key]]:
            key = unlike[0]
            raise ValueError(
                f"{self.folder} has answers that were recorded with {key}={there.get(key)!r}, not {self.settings[key]!r}; restore it, "
                "remove the folder, or give another distill.answers"
            )

    def check_recorded(self, vocab_size: int) -> None:
        """Raises ValueError: a file is damaged, its rows are not those of its answers, or a token is not below ``vocab_size``."""
        place = 0
        for path in self.files():
            ids_PK = _read(path).ids_PK
            end = place + len(ids_PK)
            with _naming(path), path.open(encoding="utf-8") as lines:
                tokens = {int(ids_PK.min()), int(ids_PK.max())} if ids_PK.size else set[int]()
                for value in map(json.loads, lines):
                    if value["place"] != place:
                        raise ValueError(f"an answer begins at row {value['place']}, not {place}")
                    place += value["num_answered"]
                    tokens |= set(value["tokens"])
                if unknown := [token for token in tokens if not 0 <= token < vocab_size]:
                    raise ValueError(f"token {unknown[0]} is none of {vocab_size}")
                if place != end:
                    raise ValueError(f"the answers end at row {place}, not {end}")

    def num_after(self, number: int) -> int:
        """The number of prompts up to the end of a file."""
        return min((number + 1) * _AT_ONCE, self.num_prompts)

    def missing(self) -> list[int]:
        """The numbers of the files that are not there yet."""
        return [number for number, path in enumerate(self.files()) if not path.exists()]

    def record(self, number: int, ask: Ask, ranks: Ranks) -> None:
        """Record one file; those before it are there. Collective. Raises on all ranks OSError: it cannot be written; ValueError: one is damaged."""
        first = number * _AT_ONCE
        own = range(first, self.num_after(number))[ranks.rank :: ranks.world_size]
        prompts = self._prompts(own, ask)
        asked = [(tokens, self._seed(item, "answer")) for item, (tokens, _) in prompts.items()]
        answers = ask(asked, self.answer_tokens, self.temperature, self.top)
        told = [
            (item, *prompt, a.token_ids, *map(np.stack, zip(*a.tops, strict=True)))
            for (item, prompt), a in zip(prompts.items(), answers, strict=True)
        ]
        everyone = sorted((each for of_rank in ranks.gather(told) for each in of_rank), key=lambda each: each[0])
        error = None
        if ranks.rank == 0:
            try:
                self._write(number, everyone)
            except (OSError, ValueError) as failure:  # an earlier file is damaged
                error = failure
        if error := ranks.gather(error)[0]:
            raise error

    def _prompts(self, items: Sequence[int], ask: Ask) -> dict[int, Prompt]:
        """The prompts by number. Questions without an end, or without room for an answer, are left out."""
        known = {item: self.prompts[item] for item in items if item < len(self.prompts)}
        others = [item for item in items if item not in known]
        questions = ask(
            [(self.first_question, self._seed(item, "question")) for item in others], self.question_tokens, 1.0, 0
        )
        for item, question in zip(others, questions, strict=True):
            text = self.decode(question.token_ids[:-1]).strip() if question.ended else ""
            if text and (prompt := self.to_prompt(text)) is not None:
                known[item] = prompt
        return known

    def _seed(self, item: int, what: str) -> int:
        return random.Random(f"{self.seed} {what} {item}").getrandbits(63)

    def _write(self, number: int, told: Sequence[tuple[Any, ...]]) -> None:
        place = sum(len(_read(path).ids_PK) for path in self.files()[:number])
        lines = list[str]()
        for _, tokens, messages, answered, *_ in told:
            value = {"prompt": messages, "answer": self.decode(answered)}
            value |= {"tokens": [*tokens, *answered], "num_answered": len(answered), "place": place}
            lines.append(json.dumps(value, ensure_ascii=False) + "\n")
            place += len(answered)
        parts = [np.concatenate([each[at] for each in told] or [np.zeros((0, self.top))]) for at in (4, 5)]
        content, path = io.BytesIO(), self.files()[number]
        np.savez(content, ids=parts[0].astype("i4"), logs=parts[1].astype("f4"))
        write_atomic(path.with_suffix(".npz"), content.getvalue())
        write_atomic(path, "".join(lines).encode())


def read_recorded(folder: Path) -> Recorded:
    """The rows of all places in the files of ``folder``. Raises ValueError: one is damaged."""
    parts = [_read(path) for path in sorted(folder.glob("*.jsonl"))]
    return Recorded(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _read(path: Path) -> Recorded:
    with _naming(path), path.with_suffix(".npz").open("rb") as file, np.load(file) as arrays:
        return Recorded(arrays["ids"], arrays["logs"])


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Inside ``with``, every error is a ValueError that says that ``path``, or the file of its rows, is damaged or may not be read."""
    try:
        yield
    except MemoryError:
        raise
    except PermissionError as error:
        raise ValueError(f"{path}: it or its .npz cannot be read ({error}); let this user read it") from None
    except Exception as error:  # noqa: BLE001, numpy raises what the damage leads to
        raise ValueError(
            f"{path}: it or its .npz is damaged ({error}); remove it, and the same command records its answers again"
        ) from None
