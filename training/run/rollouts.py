"""Answers of the model in training, with their rewards: what steps of GRPO and PPO learn from. Start with ``Rollouts``.

``Sampler`` is the engine that answers; its implementation is given by the caller of ``tightwire train``, because training knows
no server.
"""

import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from tightwire.comm.group.group import Group
from tightwire.comm.group.topology import Topology
from tightwire.model.adapters.peft import CONFIG_FILE
from tightwire.model.checkpoint.errors import ModelError, naming
from tightwire.run_page import SAMPLES, add_lines, drop_after
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.chats import Prompt
from tightwire.training.data.documents import DataError, RunData
from tightwire.training.engine.engine import Engine
from tightwire.training.log.run_log import EvaluationRecord
from tightwire.training.ranks.groups import Control
from tightwire.training.run.early_checks import find_function
from tightwire.training.run.setup import Trained
from tightwire.training.start.answers import Answer, Answers, OfAnswers, Ppo
from tightwire.training.start.lora import actors
from tightwire.training.start.model import StartingModel
from tightwire.training.start.reward import RewardModel

Reward = Callable[..., Sequence[float]]
Asked = Sequence[tuple[list[int], int]]  # the tokens of prompts, with a seed for the answer to each


class Sampler(Protocol):
    """An engine that answers prompts with the base model and the newest adapter it was given. ``bytes_sent``: to other ranks."""

    @property
    def bytes_sent(self) -> int: ...

    def load(self, matrices: Mapping[str, Tensor]) -> None:
        """Use these matrices, by their names in the model, for the answers that begin from now on."""

    def answer(self, prompts: Asked, most_tokens: int, temperature: float = 1, top: int | None = None) -> list[Answer]:
        """One answer to each (tokens, seed), drawn from the model's own probabilities, without limits. Collective.

        ``top``: keep so many of the most likely tokens at each place; None: the log-probability of each token. ModelError: scores are not finite.
        """
        ...

    def close(self) -> None: ...


# Given the starting model, the configuration, the ranks that answer together, their most sequences, and this rank's trainer.
OpenSampler = Callable[[StartingModel, TrainConfig, Group, int, Engine], Sampler]


class Engines(NamedTuple):
    """What answers prompts. ``record``: lets the target of a distillation answer. ``bytes``: those that a rank's engine holds, by kind."""

    open: OpenSampler
    record: Callable[..., RunData]
    bytes: Callable[[TrainConfig, Topology], Mapping[str, int]]


def find_reward(name: str, device: torch.device) -> Reward:
    """The reward that a configuration names: a function, or a reward model's folder. Raises ValueError: there is none."""
    if ((folder := Path(os.path.expanduser(name))) / CONFIG_FILE).is_file():
        with naming(f"rewards: {name}", "it is damaged", OSError, LookupError, TypeError, ValueError, SafetensorError):
            return RewardModel.open(folder, device)
    return find_function(name)


def rewards_of_answers(
    names: Sequence[str], rewards: Sequence[Reward], prompts: Sequence[Prompt], texts: Sequence[str]
) -> list[list[float]]:
    """What each function says of each answer. Raises DataError: one raises, or does not return a number of at most 1e15 for each."""
    keys = dict.fromkeys(key for prompt in prompts for key in prompt.columns)
    columns = {key: [prompt.columns.get(key) for prompt in prompts] for key in keys}
    found = []
    for name, reward in zip(names, rewards, strict=True):
        try:
            values = list(reward(prompts=[prompt.messages for prompt in prompts], completions=[*texts], **columns))
            numbers = [float(value) for value in values]
        except (Exception, SystemExit) as error:  # noqa: BLE001, the user's function may raise anything
            raise DataError(f"the reward {name} failed: {error!r}") from None
        if len(numbers) != len(texts):
            raise DataError(f"the reward {name} returned {len(numbers)} numbers for {len(texts)} answers")
        for number, text in zip(numbers, texts, strict=True):
            if not abs(number) <= 1e15:  # float32 has no room for the squares of much larger ones
                raise DataError(f"the reward {name} is {number} for the answer {text!r:.200}; the most is 1e15")
        found.append(numbers)
    return found


class Rollouts:
    """Samples and rewards the answers of a step on all ranks; each has its own prompts."""

    def __init__(
        self,
        config: TrainConfig,
        start: StartingModel,
        trained: Trained,
        control: Control,
        open_sampler: OpenSampler,
        group: Group,
        step: int,
        say: Callable[[str], None],
    ) -> None:
        """``group``: the ranks that answer together. ``step``: later lines of samples are dropped. ValueError: no such reward."""
        assert isinstance(trained.objective, OfAnswers)
        self._objective, self._say = trained.objective, say
        self.config, self._batch = config.answers, config.batch
        self._seed, self._tokenizer, self._trained, self._control = config.seed, start.tokenizer, trained, control
        with control.failing_together(ValueError):
            self._rewards = [find_reward(name, trained.device) for name in self.config.rewards]
        self._path = config.run_folder / SAMPLES
        if control.rank == 0:
            drop_after(self._path, step)
        at_once = config.batch.sequences // control.world_size * self.config.samples * group.world_size
        tempered = start.tempered(self.config.temperature)  # so that the engine's log-probabilities are at it too
        self._sampler = open_sampler(tempered, config, group, at_once, trained.engine)
        self.close = self._sampler.close
        self.figures: dict[str, float] = {}  # of the newest answers, over all ranks
        self._spent: dict[str, float] = {}  # on them, by this rank

    def run(self, batches: Sequence[Sequence[Prompt]], step: int) -> list[Answers]:
        """Answer the prompts of the micro-batches after ``step`` steps. Collective.

        Raises on all ranks DataError: a reward failed; ModelError: scores are not finite.
        """
        self._load()
        groups, records = self._answer(batches, step)
        self._note([record for of_rank in self._control.gather(records) for record in of_rank])
        if isinstance(self._objective, Ppo):
            moved = [batch.to(self._trained.device) for batch in groups]
            with self._trained.engine.evaluation():
                self.figures |= self._objective.prepare(self._trained.model, moved, self._control.gather_numbers)
        return groups

    def kept(self, batches: Sequence[Answers]) -> dict[str, Any]:
        """These answers as JSON, in the order of their prompts over all ranks. Collective."""
        size = self.config.samples
        rows = [row for batch in batches for row in batch.rows()]
        ranks = self._control.gather([rows[first : first + size] for first in range(0, len(rows), size)])
        return {"figures": self.figures, "prompts": [prompt for own in zip(*ranks, strict=True) for prompt in own]}

    def restored(self, kept: Mapping[str, Any]) -> list[Answers]:
        """This rank's micro-batches of ``kept`` answers, on any number of ranks."""
        self.figures, at_once = dict(kept["figures"]), self._batch.micro_sequences
        own = kept["prompts"][self._control.rank :: self._control.world_size]
        chosen = (own[first : first + at_once] for first in range(0, len(own), at_once))
        return [Answers.from_rows([row for prompt in prompts for row in prompt]) for prompts in chosen]

    def _answer(self, batches: Sequence[Sequence[Prompt]], step: int) -> tuple[list[Answers], list[dict[str, Any]]]:
        config, control = self.config, self._control
        asked = [prompt for batch in batches for prompt in batch for _ in range(config.samples)]
        # By place in the step, so that any number of ranks draws the same.
        places = (divmod(number, config.samples) for number in range(len(asked)))
        seeds = [
            random.Random(f"{self._seed} {step} {own * control.world_size + control.rank} {sample}").getrandbits(63)
            for own, sample in places
        ]
        answers, texts, each_reward = self._ask(asked, seeds)
        totals = torch.tensor(each_reward, dtype=torch.float64).sum(0)
        learned = totals.tolist()
        if config.shuffled:
            random.Random(f"{self._seed} {step} {control.rank}").shuffle(learned)
        rewards_PG = torch.tensor(learned, dtype=torch.float64).view(-1, config.samples)
        scores_PG, counts_PG = self._objective.scores(rewards_PG)
        scores_B, counts_B = scores_PG.flatten().float(), counts_PG.flatten()
        groups, first = [], 0
        for batch in batches:
            own = slice(first, first + len(batch) * config.samples)
            tokens = [prompt.token_ids for prompt in asked[own]]
            groups.append(Answers.of(tokens, answers[own], scores_B[own], counts_B[own]))
            first = own.stop
        name = self._objective.score_name
        records = [
            {
                "step": step + 1,
                "prompt": prompt.messages,
                "answer": text,
                "reward": total,
                "rewards": dict(zip(config.rewards, numbers, strict=True)),
                "tokens": len(answer.token_ids),
                "ended": answer.ended,
                **({name: score} if name else {}),
            }
            for prompt, text, total, numbers, answer, score in zip(
                asked, texts, totals.tolist(), zip(*each_reward, strict=True), answers, scores_B.tolist(), strict=True
            )
        ]
        return groups, records

    def _ask(self, given: Sequence[Prompt], seeds: Sequence[int]) -> tuple[list[Answer], list[str], list[list[float]]]:
        """An answer to each prompt, its text, and what each reward says of them. Collective. Raises as ``run``."""
        asked = [(prompt.token_ids, seed) for prompt, seed in zip(given, seeds, strict=True)]
        sent, begun_s = self._sampler.bytes_sent, time.perf_counter()
        with self._control.failing_together(DataError, ModelError):
            answers = self._sampler.answer(asked, self.config.answer_tokens)
            seconds, wire_bytes = time.perf_counter() - begun_s, self._sampler.bytes_sent - sent
            self._spent = {"answer_s": seconds, "answer_wire_bytes": wire_bytes}
            texts = [self._tokenizer.decode(each.token_ids[: len(each.token_ids) - each.ended]) for each in answers]
            judged = self.config.rewards, self._rewards, [*map(deepcopy, given)], texts  # functions may write to them
            return answers, texts, rewards_of_answers(*judged) if given else []

    def evaluate(self, prompts: Sequence[Prompt], step: int) -> EvaluationRecord:
        """The mean reward of an answer to each of ``prompts``, the same on all ranks. Collective. Raises DataError: a reward failed."""
        self._load()
        own = range(self._control.rank, len(prompts), self._control.world_size)
        _, _, each_reward = self._ask([prompts[place] for place in own], own)
        sums = self._control.gather_numbers(sum(map(sum, each_reward)))
        reward = sum(number for (number,) in sums) / len(prompts)
        return EvaluationRecord(step=step, held_out_loss=None, tokens=len(prompts), figures={"reward": reward})

    def _load(self) -> None:
        """Give the newest adapter to the engine. Collective."""
        self._sampler.load({name: tensor.clone() for name, tensor in actors(self._trained.engine.full_tensors())})

    def _note(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Set the figures, and write the samples on rank 0."""
        rewards = [record["reward"] for record in records]
        rewards_PG = torch.tensor(rewards, dtype=torch.float64).view(-1, self.config.samples)
        self.figures = {
            "reward": float(rewards_PG.mean()),
            "answer_tokens": sum(record["tokens"] for record in records) / len(records),
            "ended": sum(record["ended"] for record in records) / len(records),
            **self._objective.group_figures(rewards_PG),
            **self._spent,
        }
        if self._control.rank == 0:
            try:
                add_lines(self._path, records)
            except OSError as error:
                # Keep training, as without lines of the log: a full disk may have room again later.
                self._say(f"WARNING: {self._path} misses the answers of step {records[0]['step']}: {error}")
