"""Computes the mean loss on held-out sequences over all ranks, and writes greedy continuations of prompts."""

from collections.abc import Callable, Sequence

import torch

from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.chats import IGNORED, Row
from tightwire.training.data.sequences import TokenSequence, stack
from tightwire.training.log.run_log import EvaluationRecord
from tightwire.training.ranks.groups import Control
from tightwire.training.run.setup import Trained
from tightwire.training.start.model import StartingModel


class Evaluator:
    """Evaluates the weights on held-out sequences. Each of W ranks evaluates every W-th of ``sequences``, the same on all."""

    def __init__(
        self,
        config: TrainConfig,
        trained: Trained,
        start: StartingModel,
        control: Control,
        sequences: Sequence[TokenSequence | Row],
        stop_signal: Callable[[], int],
    ) -> None:
        self._config, self._trained, self._start, self._control = config.evaluation, trained, start, control
        self._stop_signal, self._is_chat = stop_signal, config.data.kind != "text"
        at_once, own = config.batch.micro_sequences, list(sequences[control.rank :: control.world_size])
        num_batches = -(-len(sequences) // (control.world_size * at_once))
        # Each pass gathers weights, so all ranks run the same number; fill up with sequences whose targets are ignored.
        filler = [sequences[0]] * (num_batches * at_once - len(own))
        batch = stack([*own, *filler]).to(trained.device)
        batch.targets_BS[len(own) :] = IGNORED
        self._batches = batch.split(at_once)

    def run(self, step: int) -> EvaluationRecord | int:
        """The record after ``step`` steps, the same on all ranks, or the signal that some rank received. Collective."""
        model, objective = self._trained.model, self._trained.objective
        totals, samples = list[list[float]](), list[tuple[str, str]]()
        model.eval()
        with self._trained.engine.evaluation():
            for part in (*self._batches, *self._config.prompts):
                if signal := max(self._control.gather_numbers(self._stop_signal()))[0]:
                    return int(signal)
                if isinstance(part, str):
                    samples.append((part, self._continue(part)))
                else:
                    totals.append(objective.total(model, part))
        model.train()
        own = [sum(column) for column in zip(*totals, strict=True)]
        items, *sums = (sum(column) for column in zip(*self._control.gather_numbers(*own), strict=True))
        loss, *means = (total / items for total in sums)
        told = {"samples": tuple(samples), "figures": dict(zip(objective.figures, means, strict=True))}
        return EvaluationRecord(step=step, held_out_loss=loss, tokens=int(items), **told)

    def _continue(self, prompt: str) -> str:
        """The greedy continuation, cut at the end token."""
        tokenizer, positions = self._start.tokenizer, self._start.config.max_positions
        ids = tokenizer.encode(prompt) or [tokenizer.bos_token_id or 0]
        if self._is_chat:
            ids = tokenizer.encode_chat([{"role": "user", "content": prompt}])
        begin = len(ids)
        # Do not stop early: each pass gathers weights, so all ranks must run the same number.
        for _ in range(self._config.sample_tokens):
            inputs_1S = torch.tensor([ids[-positions:]], device=self._trained.device)
            logits_V = self._trained.model(input_ids=inputs_1S, use_cache=False, logits_to_keep=1).logits[0, -1]
            ids.append(int(logits_V.argmax()))
        ends = [at for at in range(begin, len(ids)) if ids[at] in tokenizer.eos_token_ids]
        return tokenizer.decode(ids[begin : min(ends, default=len(ids))])
