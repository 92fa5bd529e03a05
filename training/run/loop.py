"""Runs the training steps: batches, engine, optimizer, logging, evaluation and checkpoints.

After each step, ranks exchange a few numbers, among them a stop signal and whether the next step's data failed to load. So all
ranks stop after the same step.
"""

import math
import random
import resource
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, NoReturn

import torch

from tightwire.allocator import trim_freed_memory
from tightwire.model.checkpoint.errors import ModelError
from tightwire.threads import ReadAhead
from tightwire.training.checkpoint.files import Checkpointer
from tightwire.training.checkpoint.folders import CheckpointError, newest_before, step_of
from tightwire.training.checkpoint.state import find_not_finite, snapshot
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import DataError
from tightwire.training.log.run_log import EvaluationRecord, RunLog, StepRecord, Terminal
from tightwire.training.optimizer import learning_rate
from tightwire.training.ranks.groups import Control
from tightwire.training.run.rollouts import Rollouts
from tightwire.training.run.setup import Trained


class DivergedError(RuntimeError):
    """Gradients or weights are inf or NaN; these weights are not saved."""


class BrokenDataError(RuntimeError):
    """The data of the next step cannot be read; the trained weights are saved."""


class Begin(NamedTuple):
    """Where a run goes on: at a checkpoint, or as a new one."""

    checkpoint: Path | None = None
    step: int = 0
    position: int = 0
    kept_answers: Mapping[str, Any] | None = None  # ``Rollouts.kept``: the checkpoint is among the steps of one rollout


@dataclass(kw_only=True)
class Loop:
    """One run on one rank. ``step`` and ``position`` start at those of ``begin`` and advance with each step."""

    config: TrainConfig
    trained: Trained
    control: Control
    batches: ReadAhead[Any]
    evaluate: Callable[[int], EvaluationRecord | int] | None
    checkpointer: Checkpointer
    describe: Callable[[int, int], Mapping[str, Any]]  # a checkpoint's metadata, by step and position
    terminal: Terminal
    log: RunLog | None  # None on ranks that do not write it
    rollouts: Rollouts | None  # answers the prompts of ``batches``; None: these are what is learned
    stop_signal: Callable[[], int]
    flops_per_token: int
    peak_flops: float
    begin: Begin

    def __post_init__(self) -> None:
        self.last_checkpoint, self.step, self.position, _ = self.begin
        self._saved_step = self.step
        self._model, self._engine, self._state = self.trained.model, self.trained.engine, self.trained.state
        self._accumulation = self.config.batch.accumulation(self.control.world_size)
        self._upcoming: list[Any] = []  # micro-batches of the next step, or of several that learn from the same answers
        self._weight = 0  # targets or pairs of the next step, over all ranks
        self._data_error = ""
        self._logs = True  # the newest record was written to the log

    def run(self) -> int:
        """Train until the last step or a signal, and save. Returns the signal's number, or 0 after the last step.

        Raises DataError, BrokenDataError: data cannot be read; DivergedError: gradients or weights are inf or NaN;
        CheckpointError: the last checkpoint could not be written.
        """
        self._model.train()
        signal = self._begin()
        while self.step < self.config.schedule.steps and not signal:
            signal, is_broken = self._step()
            is_last = self.step == self.config.schedule.steps
            evaluates = is_last or self._due(self.config.evaluation.every)
            saves = signal or is_broken or is_last or self._due(self.config.checkpoint.every)
            if saves or evaluates:
                self._check_finite()
            if evaluates and not signal and not is_broken and self.evaluate is not None:  # after a signal, save at once
                try:
                    found = self.evaluate(self.step)
                    if isinstance(found, int):  # a signal ended it
                        signal = saves = found
                    else:
                        self._log_record(found)
                except DataError as error:  # a reward failed
                    self._data_error, is_broken, saves = str(error), True, True
                except ModelError as error:
                    self._diverge(f"after step {self.step}: {error}")
            if saves:
                self._save()
            if is_broken:
                self._end_without_data()
        self._complete_checkpoint(raising=True)
        return signal

    def _begin(self) -> int:
        """Read the data up to ``position``. Returns the signal that some rank received, or 0."""
        if self.position and self.step < self.config.schedule.steps:
            self.terminal.say(f"reading the data up to position {self.position}")
        if self.begin.kept_answers is not None and self.rollouts is not None:
            self._upcoming = self.rollouts.restored(self.begin.kept_answers)
        with self.control.failing_together(DataError):
            self._read()
            if self._data_error:
                raise DataError(self._data_error)
        signals, weights = zip(*self.control.gather_numbers(self.stop_signal(), self._own_weight()), strict=True)
        self._weight = int(sum(weights))
        return int(max(signals))

    def _read(self) -> None:
        """Read the next step's micro-batches. A signal ends the wait."""
        if self._upcoming and self._keeps_answers:
            return
        self._upcoming = []
        if self.step == self.config.schedule.steps:
            return
        try:
            while len(self._upcoming) < self._accumulation:
                batch = self.batches.get(self.stop_signal)
                if batch is None:
                    break
                self._upcoming.append(batch)
        except Exception as error:  # noqa: BLE001, whatever the reader raised: the trained weights are saved
            self._data_error = str(error) if isinstance(error, DataError) else f"the data cannot be read: {error!r}"
        if self.rollouts is not None:
            self._answer(self.rollouts)

    def _answer(self, rollouts: Rollouts) -> None:
        """Replace the prompts of the next step by their answers. Collective."""
        is_whole = len(self._upcoming) == self._accumulation and not self.stop_signal()
        try:
            all_are = all(whole for (whole,) in self.control.gather_numbers(is_whole))
            self._upcoming = rollouts.run(self._upcoming, self.step) if all_are else []
        except DataError as error:
            self._upcoming, self._data_error = [], str(error)
        except ModelError as error:
            self._diverge(f"after step {self.step}: {error}")

    @property
    def _keeps_answers(self) -> bool:
        """True if the next step learns from the answers of the last one again."""
        return self.rollouts is not None and self.step % self.config.answers.updates != 0

    def _next_batches(self) -> list[Any]:
        """The micro-batches of the next step."""
        num_steps = self.config.answers.minibatches  # that divide ``_upcoming``
        size = len(self._upcoming) // num_steps
        first = self.step % num_steps * size
        return self._upcoming[first : first + size]

    def _step(self) -> tuple[int, bool]:
        """Run one step. Returns the signal that some rank received, and whether some rank failed to read its data."""
        begun, sent, waited = perf_counter(), self._engine.bytes_sent, self._engine.waited_s
        rate = learning_rate(self.config.schedule, self.config.optimizer.lr, self.step)
        (loss, *sums), items = self._gradients(), self._weight
        norm = self._update_weights(rate, loss)
        tokens = sum(batch.inputs_BS.numel() for batch in self._next_batches())
        self.step += 1
        self.position += 0 if self._keeps_answers else self.config.batch.sequences
        figures = {} if self.rollouts is None else self.rollouts.figures  # of the answers that this step learned from
        self._read()
        own = loss, tokens, self.stop_signal(), self.checkpointer.written, _memory_bytes(self.trained.device)
        ranks = self.control.gather_numbers(*own, bool(self._data_error), self._own_weight(), *sums)
        losses, all_tokens, signals, written, memory, broken, weights, *totals = zip(*ranks, strict=True)
        self._weight = int(sum(weights))
        means = [sum(total) / max(items, 1) for total in totals]
        seconds, tokens = perf_counter() - begun, int(sum(all_tokens))
        self._log_record(
            StepRecord(
                step=self.step,
                loss=sum(losses) / len(losses),
                lr=rate,
                grad_norm=norm,
                tokens=tokens,
                seconds=seconds,
                mfu=self._utilization(tokens / seconds),
                memory_bytes=int(max(memory)),
                wire_bytes=self._engine.bytes_sent - sent,
                exposed_ms=1e3 * (self._engine.waited_s - waited),
                figures=figures | dict(zip(self.trained.objective.figures, means, strict=True)),
            )
        )
        if all(written):
            self._complete_checkpoint(raising=False)
        return int(max(signals)), any(broken)

    def _update_weights(self, rate: float, loss: float) -> float:
        """Step the optimizer; returns the norm of the gradient before clipping. Raises DivergedError: it is not finite."""
        norm = self._engine.clip_gradients(self.config.optimizer.clip_norm or math.inf)
        if not math.isfinite(norm):
            self._fail_by_gradient(loss)
        for group in self._state.optimizer.param_groups:
            group["lr"] = rate
        self._state.optimizer.step()
        trim_freed_memory()  # or a process grows from step to step
        self._engine.weights_changed()
        return norm

    def _utilization(self, tokens_per_s: float) -> float:
        """The share of a rank's peak rate that all ranks' ``tokens_per_s`` are: MFU."""
        reached = self.flops_per_token * tokens_per_s / self.control.world_size
        if self.config.log.peak_tflops is None:
            # A step can be faster than the measured peak, because other programs may have run during that measurement.
            self.peak_flops = max(self.peak_flops, reached)
        return reached / self.peak_flops

    def _gradients(self) -> list[float]:
        """Run forward and backward of all micro-batches.

        Returns the loss, of which the mean over ranks is that of all items, and this rank's sums of the objective's figures.
        """
        total = torch.zeros((), device=self.trained.device)
        totals = torch.zeros(len(self.trained.objective.figures), device=self.trained.device)
        batches = self._next_batches()
        for number, batch in enumerate(batches):
            # Items of all ranks weigh the same, however many a micro-batch has; of text, all have equally many.
            own = self.trained.objective.weight(batch)  # 0: in no group of answers do the rewards differ
            share = self._weight / (self.control.world_size * own) if own else 1.0
            batch = batch.to(self.trained.device)
            self._seed_dropout(number)
            with self._engine.micro_batch(last=number == len(batches) - 1):
                loss, sums = self.trained.objective.loss(self._model, batch)
                loss = loss / share
                loss.backward()
            total += loss.detach()
            totals += sums
        self._engine.finish_gradients()
        return [float(total), *totals.tolist()]

    def _own_weight(self) -> int:
        """The targets or pairs that this rank has in the next step."""
        return sum(self.trained.objective.weight(batch) for batch in self._next_batches())

    def _seed_dropout(self, micro_batch: int) -> None:
        """Make dropout depend on the step alone, so that a resumed run draws the same."""
        if self.config.model.lora is not None and self.config.model.lora.dropout:
            where = f"{self.config.seed} {self.step} {self.control.rank} {micro_batch}"
            torch.manual_seed(random.Random(where).getrandbits(63))

    def _fail_by_gradient(self, loss: float) -> None:
        """Raise DivergedError. Collective: the norm is the same on all ranks."""
        grads = {shard.name: shard.flat_N.grad for shard in self._state.shards}
        own = [name for name, grad in grads.items() if grad is not None and not grad.isfinite().all()]
        ranks = self.control.gather((loss, own))
        names = ", ".join(sorted({name for _, names in ranks for name in names})) or "no single shard"
        losses = ", ".join(f"{loss:.4g}" for loss, _ in ranks)
        self._diverge(f"step {self.step + 1}: the gradient is inf or NaN in {names} (the ranks' losses: {losses})")

    def _check_finite(self) -> None:
        """Raise DivergedError if weights or optimizer state are not finite. Collective."""
        ranks = self.control.gather(find_not_finite(self._state))
        if names := ", ".join(sorted({name for own in ranks for name in own})):
            self._diverge(f"step {self.step}: weights or optimizer state are inf or NaN in {names}; they are not saved")

    def _diverge(self, what: str) -> NoReturn:
        """Raise DivergedError. Collective."""
        self._complete_checkpoint(raising=False)
        raise DivergedError(f"{what}; {self._advice()}")

    def _advice(self) -> str:
        """How to continue. A checkpoint counts as good only if it is older than the failed step."""
        newest = self.last_checkpoint
        good = newest_before(self.config.run_folder, self.step)
        if newest is None:
            where = "there is no checkpoint yet"
        elif step_of(newest) < self.step:
            where = f"the last good checkpoint is {newest}"
        else:
            instead = f"to resume from the last good checkpoint, {good}" if good else "and start again"
            where = f"{newest} has the weights of this step: remove that folder, {instead}"
        return (
            f"{where}. The same run would fail again: give a lower optimizer.lr, a longer "
            "schedule.warmup_steps or a smaller optimizer.clip_norm"
        )

    def _end_without_data(self) -> None:
        """Raise BrokenDataError after saving. Collective."""
        self._complete_checkpoint(raising=True)
        text = next(text for text in self.control.gather(self._data_error) if text)
        raise BrokenDataError(
            f"after step {self.step}: {text}. The trained weights are in {self.last_checkpoint}; repair the file without changing "
            "its size (for example, blank out a bad JSON line), or the reward, and the same command resumes"
        )

    def _save(self) -> None:
        self._complete_checkpoint(raising=False)
        if self.step == self._saved_step:
            return
        chunks = snapshot(self._state)
        description = dict(self.describe(self.step, self.position))
        if self.rollouts is not None and self._keeps_answers:
            description["answers"] = self.rollouts.kept(self._upcoming)
        self.checkpointer.begin(self.step, chunks, description)
        self._saved_step = self.step

    def _complete_checkpoint(self, *, raising: bool) -> None:
        """Wait for a checkpoint in progress, if any. Collective."""
        if not self.checkpointer.writing:
            return
        folder, error, warning = self.checkpointer.complete(self.terminal.say)
        if warning:
            self.terminal.say(f"WARNING: {warning}")
        if not error:
            self.last_checkpoint = folder
            self.terminal.say(f"saved the checkpoint {folder}")
            return
        last = self.last_checkpoint or "none"
        text = f"the checkpoint {folder.name} could not be written: {error}. The last good checkpoint is {last}"
        if raising:
            raise CheckpointError(f"{text}; free space, and run the same command again")
        self.terminal.say(f"WARNING: {text}; the run continues")

    def _due(self, every: int) -> bool:
        return every > 0 and self.step % every == 0

    def _log_record(self, record: StepRecord | EvaluationRecord) -> None:
        if self.log is not None:
            try:
                self.log.add(record)
                self._logs = True
            except OSError as error:  # keep training: a full disk may have room again later
                if self._logs:
                    self.terminal.say(f"WARNING: the log misses lines from step {record.step} on: {error}")
                self._logs = False
        if isinstance(record, StepRecord):
            self.terminal.step(record)
        else:
            self.terminal.evaluation(record)


def _memory_bytes(device: torch.device) -> int:
    """Peak memory of this process: reserved CUDA memory, or resident memory on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
