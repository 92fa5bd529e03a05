"""Runs training on one rank, from the configuration to the exported model."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import chain
from pathlib import Path
from threading import Event
from typing import Any

import torch
import yaml

from tightwire.comm.errors import CommError
from tightwire.comm.group.topology import Topology
from tightwire.model.checkpoint.catalog import CATALOG
from tightwire.parent_death import stop_signals
from tightwire.progress import spinner
from tightwire.run_page import write_page
from tightwire.threads import ReadAhead
from tightwire.training.checkpoint.files import Checkpointer
from tightwire.training.checkpoint.folders import CheckpointError, OtherRunError, check_files, find_checkpoint
from tightwire.training.checkpoint.state import check_checkpoint, describe_checkpoint, identity_of, restore
from tightwire.training.config.tree import TrainConfig
from tightwire.training.data.documents import RunData, fingerprint_of
from tightwire.training.data.sequences import AnyPacker, held_out_sequences, rank_batches
from tightwire.training.engine.options import EngineOptions, engine_options
from tightwire.training.estimate.memory import checkpoint_bytes
from tightwire.training.estimate.step import advice, dtype_advice, flops_per_token, model_step, peak_flops
from tightwire.training.log.run_log import EvaluationRecord, RunLog, Terminal
from tightwire.training.log.timeline import Timeline
from tightwire.training.ranks.groups import open_store, rollout_group
from tightwire.training.run.checks import (
    check_disk_space,
    check_frozen,
    check_replicas,
    check_same_configuration,
    find_export_folder,
    make_run_folder,
)
from tightwire.training.run.early_checks import check_early, find_topology
from tightwire.training.run.evaluate import Evaluator
from tightwire.training.run.loop import Begin, BrokenDataError, DivergedError, Loop
from tightwire.training.run.rollouts import Engines, Rollouts
from tightwire.training.run.setup import Ranks, connect_ranks, find_device, make_packer, make_trained, usable_bytes
from tightwire.training.start.export import CRITIC, export_adapter, export_folder
from tightwire.training.start.lora import actors, critics
from tightwire.training.start.model import HEAD_NAME, StartingModel, open_starting_model
from tightwire.whole_folder import write_atomic

# Errors after a run has started.
FAILURES = (CheckpointError, BrokenDataError, DivergedError, CommError, OSError)
_READ_AHEAD = 4  # micro-batches, or those of a step if it has more
_TOKENIZER = "tokenizer"


def run_training(
    config: TrainConfig, environment: Mapping[str, str] = os.environ, *, engines: Engines | None = None
) -> int:
    """Train, save and export. Returns the number of the signal that ended the run, or 0.

    ``engines``: what answers the prompts of GRPO, of PPO and of a distillation. Raises ValueError before anything has been changed, and one of ``FAILURES`` if the run cannot go on.
    """
    topology = find_topology(environment, config.parallel.nodes)
    data, options = check_early(config, topology), engine_options(config)
    with ExitStack() as stack:
        with spinner("connecting the ranks, opening the model and the optimizer", environment):
            device = find_device(config.device, topology)
            store = open_store(environment, topology, timeout_s=config.parallel.timeout_s)
            ranks = stack.enter_context(connect_ranks(config.parallel, topology, store, device))
            received = stack.enter_context(stop_signals())
            run = Run(config, options, data, ranks, engines)
        stack.callback(run.trained.engine.close)
        return run.train(received)


class Run:
    """A run on connected ranks. All ranks make the same calls."""

    def __init__(
        self, config: TrainConfig, options: EngineOptions, data: RunData, ranks: Ranks, engines: Engines | None = None
    ) -> None:
        """Raises ValueError: ranks have different configurations, a folder cannot be written, or there is no such model."""
        self._config, self._data, self._control, self._engines = config, data, ranks.control, engines
        self._answering = rollout_group(ranks.groups.main, config.rollout.tp)
        check_same_configuration(config, data, ranks.control)
        self._folder = make_run_folder(config, ranks.control, ranks.held)
        self._start = _open_starting_model(config, data, self._folder, ranks)
        self._identity = identity_of(config, self._start, files=fingerprint_of(data.documents.files))
        if config.parallel.checkpoint_blocks == "auto":
            topology = Topology(0, ranks.groups.world_size, num_nodes=ranks.groups.num_nodes)
            usable = usable_bytes(ranks.groups.device, find_topology(os.environ, None).ranks_per_node)
            options = model_step(config, options, self._start.config, topology).fitting(usable).options
        self._timeline = Timeline() if config.log.trace else None
        traced = {} if self._timeline is None else {"trace": self._timeline}
        self.trained = make_trained(config, options, self._start, ranks.groups, **traced)
        plan, replicas = self.trained.engine.plan, self.trained.state.replica.size
        kept = checkpoint_bytes(config.optimizer, plan, config.parallel.between, replicas)
        written = plan.num_parameters if config.model.lora is None else plan.num_trainable
        with ranks.control.failing_together(ValueError):
            if ranks.control.rank == 0:  # rank 0 writes the model
                check_disk_space(config, self._folder, checkpoint_bytes=kept, num_parameters=written)

    def train(self, stop_signal: Callable[[], int]) -> int:
        """Train from the newest checkpoint or from the start. ``stop_signal``: the signal that this rank received, or 0."""
        config, control, start, trained = self._config, self._control, self._start, self.trained
        begin = self._load()
        if config.distill is not None:  # the target's answers are the data
            self._data = self._need_engines().record(config, self._data, start, control, trained.device)
        terminal = Terminal(config.schedule.steps, config.log.every, rank=control.rank, done=begin.step)
        log = rollouts = None
        pack = make_packer(config, start)
        batches = self._read_ahead(pack, begin)
        try:
            with control.failing_together(ValueError):
                if control.rank == 0:
                    log = RunLog(self._folder, after_step=begin.step, tensorboard=config.log.tensorboard)
            terminal.say(self._describe_start(begin.checkpoint))
            peak = self._peak_flops(terminal)
            if config.data.kind == "prompts":
                with control.failing_together(ValueError):
                    shared = control, self._need_engines().open, self._answering
                    rollouts = Rollouts(config, start, trained, *shared, begin.step, terminal.say)
            evaluate = self._make_evaluate(pack, rollouts, stop_signal)
            with control.failing_together(OSError):  # from here on nothing refuses the run
                if control.rank == 0:
                    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
                    write_atomic(self._folder / "config.yaml", settings.encode())
            sizes, scores = (config.data.sequence_tokens, config.product_passes), config.model.head == "reward"
            loop = Loop(
                config=config,
                trained=trained,
                control=control,
                batches=batches,
                evaluate=evaluate,
                checkpointer=Checkpointer(self._folder, control, keep=config.checkpoint.keep),
                describe=lambda step, position: describe_checkpoint(
                    config, self._identity, trained.state, frozen_sum=self._frozen_sum, step=step, position=position
                ),
                terminal=terminal,
                log=log,
                rollouts=rollouts,
                stop_signal=stop_signal,
                flops_per_token=flops_per_token(start.config, *sizes, scores=scores),
                peak_flops=peak,
                begin=begin,
            )
            signal = loop.run()
            if signal:
                saved = "saved" if loop.step > begin.step else "nothing new to save"
                at = f"step {loop.step} of {config.schedule.steps}"
                terminal.say(f"stopped after {at}, {saved}; the same command resumes")
            else:
                self._export(terminal)
            return signal
        finally:
            batches.close()
            terminal.close()
            if rollouts is not None:
                rollouts.close()
            if log is not None:
                log.close()
                self._write(terminal, "run's page", self._write_page)
            if self._timeline is not None:
                self._write(terminal, "trace", partial(self._timeline.write, self._folder, control.rank))

    def _read_ahead(self, pack: AnyPacker, begin: Begin) -> ReadAhead[Any]:
        """This rank's micro-batches from ``begin`` on, read in a thread; the prompts of kept answers are used already."""
        config, control, closed = self._config, self._control, Event()
        first = begin.position + (config.batch.sequences if begin.kept_answers else 0)
        of_rank = {"rank": control.rank, "world_size": control.world_size}
        ahead = max(_READ_AHEAD, config.batch.accumulation(control.world_size))
        return ReadAhead(rank_batches(self._data, pack, **of_rank, position=first, closed=closed), ahead, closed)

    def _peak_flops(self, terminal: Terminal) -> float:
        """The device's operations a second, given or measured. Warns of what the configuration wastes."""
        config, trained = self._config, self.trained
        wasteful = advice(config.parallel.between, trained.engine.plan, trained.state.replica.size)
        dtype, given = getattr(torch, config.model.compute_dtype), (config.log.peak_tflops or 0) * 1e12
        peak = given or peak_flops(trained.device, dtype)
        for text in chain(wasteful, () if given else dtype_advice(trained.device, dtype, peak)):
            terminal.say(f"WARNING: {text}")
        return peak

    def _make_evaluate(
        self, pack: AnyPacker, rollouts: Rollouts | None, stop_signal: Callable[[], int]
    ) -> Callable[[int], EvaluationRecord | int] | None:
        """What evaluates the weights after a step: the loss or the rewards of held-out data; None: nothing is held out."""
        config, data = self._config, self._data
        has_held_out = data.held_out_documents is not None or data.held_out_share > 0
        if not config.evaluation.every or (rollouts is not None and not has_held_out):
            return None
        held_out: Any = held_out_sequences(data, pack)
        if rollouts is not None:
            return partial(rollouts.evaluate, held_out)
        return Evaluator(config, self.trained, self._start, self._control, held_out, stop_signal).run

    def _need_engines(self) -> Engines:
        if self._engines is None:
            kind = self._config.data.kind
            raise ValueError(f"data.kind={kind} needs an engine that answers; start the run with `tightwire train`")
        return self._engines

    def _write_page(self) -> str:
        page = write_page(self._folder)
        return f"figures and answers are in {page}" if page else ""

    def _write(self, terminal: Terminal, name: str, write: Callable[[], str]) -> None:
        """Write a file that is no part of the result, and say what ``write`` returns."""
        try:
            if said := write():
                terminal.say(said)
        except OSError as error:
            terminal.say(f"WARNING: the {name} could not be written: {error}")

    def _load(self) -> Begin:
        """Load the weights of the newest checkpoint, or of the start."""
        config, control, trained = self._config, self._control, self.trained
        with control.failing_together(OtherRunError):
            checkpoint = find_checkpoint(self._folder, resume=config.checkpoint.resume)
        checkpoint = control.gather(checkpoint)[0]
        if checkpoint is None:
            trained.engine.load_full(self._start.read, self._start.read_blocks)
            self._frozen_sum = check_replicas(trained.state, trained.engine, control)
            return Begin()
        with control.failing_together(OtherRunError, CheckpointError):
            description = check_checkpoint(checkpoint, self._identity, config)
            check_files(checkpoint, description, rank=control.rank, world_size=control.world_size)
        with control.failing_together(OtherRunError, CheckpointError):
            restore(checkpoint, description, trained.state)
        trained.engine.load_frozen(self._start.read, self._start.read_blocks)
        trained.engine.weights_changed()
        self._frozen_sum = check_replicas(trained.state, trained.engine, control)
        check_frozen(checkpoint, description, self._frozen_sum)
        return Begin(checkpoint, description["step"], description["position"], description.get("answers"))

    def _describe_start(self, checkpoint: Path | None) -> str:
        config, world_size, engine = self._config, self._control.world_size, self.trained.engine
        ranks = f"{world_size} rank{'s' if world_size > 1 else ''}"
        start = "random weights" if config.model.shape is not None else self._start.name
        begins = f"resuming from {checkpoint}" if checkpoint else f"training from {start}"
        count = min(engine.options.checkpoint_blocks, len(engine.plan.block_modules))
        how = f"sharding {config.parallel.sharding}{f', {count} blocks recomputed' if count else ''}"
        return f"{begins}: {config.schedule.steps} steps on {ranks}, {how}, in the folder {self._folder}"

    def _export(self, terminal: Terminal) -> None:
        config = self._config
        out = find_export_folder(config, self._folder)
        trained, start, lora = self.trained.engine.full_tensors, self._start, config.model.lora
        how: Any = {"dtype": getattr(torch, config.export.dtype), "writes": self._control.rank == 0}
        if lora is None:
            tensors = chain(trained(), self._frozen_tensors())
            error = export_folder(out, tensors, start.config, start.tokenizer, **how)
        else:
            given, is_alone = Path(os.path.expanduser(config.model.start)), config.ppo is None
            is_path = given.exists() and config.model.start not in CATALOG
            base = str(given.absolute()) if is_path else config.model.start
            error = export_adapter(out, trained() if is_alone else actors(trained()), lora, base, **how)
            if not is_alone:
                values = critics(trained(), HEAD_NAME)
                error = export_adapter(self._folder / CRITIC, values, lora, base, **how) or error
        if error := self._control.gather(error)[0]:
            raise CheckpointError(
                f"the trained model could not be exported: {error}; its checkpoint is complete, and the same command exports it again"
            )
        if config.model.head == "reward":
            terminal.say(f"the reward model is in {out}")
        elif lora is not None:
            terminal.say(f"the adapter is in {out}; serve it: tightwire serve {config.model.start} --lora mine={out}")
        else:
            target = config.distill and f"{config.distill.target} --speculation draft --draft-model "
            terminal.say(f"the model is in {out}; serve it: tightwire serve {target or ''}{out}")

    def _frozen_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The frozen weights as the starting model has them, on the rank that writes them."""
        if self._control.rank == 0:
            for flat_param in self.trained.engine.plan.flat_params:
                for param in () if flat_param.trainable else flat_param.params:
                    yield param.name, self._start.read(param.name)


def _open_starting_model(config: TrainConfig, data: RunData, run: Path, ranks: Ranks) -> StartingModel:
    """Rank 0 opens the model first: it may download a model or train a tokenizer, which the other ranks then read."""
    how: Any = {"seed": config.seed, "keep_in": run / _TOKENIZER, "texts": partial(data.training, 0, in_order=True)}
    how |= {"files": fingerprint_of(data.documents.files), "resumes": find_checkpoint(run, resume=True) is not None}
    own = None
    with ranks.control.failing_together(ValueError):
        if ranks.control.rank == 0:
            try:
                data.check_documents()
                own = open_starting_model(config.model, **how)
            except OSError as error:  # that of a full disk names no file
                raise ValueError(f"{run}: {error}" if error.errno and not error.filename else str(error)) from None
    return own or open_starting_model(config.model, **how)
