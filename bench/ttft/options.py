"""The options of ``tightwire bench ttft``, and the checks against the model that need no running server.

The server's own options (model, ranks, link, engine) are flags of ``serve`` and are passed on to the measured server.
"""

from collections.abc import Collection, Sequence
from dataclasses import Field, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Self

from tightwire.bench.options import LAST_LINE, OutputOptions
from tightwire.comm.all_reduce.names import describe_all_reduce_names, split_all_reduce_names, split_name
from tightwire.comm.policy.rules import read_policy_file
from tightwire.option import flag_of, naming_flag, option
from tightwire.option_flags import add_flags, make_options
from tightwire.server.config.flags import make_parser, parse, refuse_serving_flags
from tightwire.server.config.parallel import POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import ServeConfig, option_fields
from tightwire.server.plan.setting import refuse_wrong_model

GROUPS = ("model", "parallel", "engine")
AUTO = "auto"  # the default of serve: always measured, because the advice compares with it
TENSOR = "tensor"  # the layout that a request to a hybrid server asks for
_ALGORITHMS = (AUTO, "native", "one-shot", "two-shot", "flash-int8", "flash-int4")
# Flags of serve that this bench sets itself.
_OURS = {
    "allreduce": "name AllReduces with --algorithms",
    "allreduce_extra": "name AllReduces with --algorithms",
    "layout": "AllReduces are compared in the layout tensor; --layouts tensor,hybrid compares layouts",
    "prefix_cache": "every prompt is computed; use `tightwire bench serve`",
}
_RANKS = 2  # the default of --tp in this bench


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftOptions(OutputOptions):
    """``config`` is the server's, without the AllReduce."""

    description: ClassVar[str] = "Start one server and compare AllReduces on it by time to first token."
    config: ServeConfig = field(default_factory=lambda: ServeConfig(parallel=ParallelOptions(tp=_RANKS)))
    algorithms: tuple[str, ...] = option(
        _ALGORITHMS,
        f"AllReduces to compare: {describe_all_reduce_names()}, or policy:FILE; auto, the server's default, is always compared",
        parse=split_all_reduce_names,
    )
    layouts: tuple[str, ...] = option((), "tensor,hybrid: layouts to compare in place of AllReduces", metavar="A,B")
    baseline: str | None = option(None, "what the others are compared with (default: auto, or the first layout)")
    prompt_lens: tuple[int, ...] = option((128, 512), "prompt tokens", least=1)
    concurrency: tuple[int, ...] = option((1,), "requests at a time", least=1)
    repeats: int = option(8, "rounds; each runs every algorithm once in every cell, in random order", least=2)
    output_len: int = option(8, "tokens to generate", least=2)
    nnodes: int = option(
        1,
        "hosts: network namespaces of this machine, each with its share of the cores and a `tightwire serve` of its own; "
        "--link is then the rate of each host's wire",
        least=1,
    )

    def __post_init__(self) -> None:
        tp = self.config.parallel.tp
        if self.nnodes > 1 and self.config.parallel.link is None:
            raise ValueError(f"--nnodes {self.nnodes} needs --link, the rate of each host's wire, such as --link 1gbit")
        if tp < 2:
            raise ValueError(f"--tp must be at least 2, got {tp}: a single rank needs no AllReduce")
        if self.arms == (AUTO,):
            raise ValueError("--algorithms needs a name beside auto; auto,auto shows the noise of a comparison")
        for name in self.algorithms:
            self._check_algorithm(name)
        if self.layouts and sorted(self.layouts) != ["hybrid", TENSOR]:
            raise ValueError(f"--layouts must be tensor,hybrid or hybrid,tensor, got {','.join(self.layouts)}")
        if self.baseline_name not in self.arms:
            raise ValueError(f"--baseline must be one of --algorithms ({', '.join(self.arms)}), got {self.baseline}")
        for flag, values in (("--prompt-lens", self.prompt_lens), ("--concurrency", self.concurrency)):
            if len(set(values)) < len(values):
                raise ValueError(f"{flag} takes different numbers, got {','.join(map(str, values))}")
        if max(self.concurrency) > self.config.engine.max_num_seqs:
            raise ValueError(
                f"--concurrency {max(self.concurrency)} exceeds the {self.config.engine.max_num_seqs} sequences of a step, so "
                "requests would queue; raise --max-num-seqs"
            )
        refuse_wrong_model(self.config)

    @property
    def arms(self) -> tuple[str, ...]:
        """The AllReduces to measure, a name twice if it was given twice; or the layouts."""
        return self.layouts or (self.algorithms if AUTO in self.algorithms else (AUTO, *self.algorithms))

    @property
    def baseline_name(self) -> str:
        return self.baseline or (self.layouts or (AUTO,))[0]

    def _check_algorithm(self, name: str) -> None:
        with naming_flag("algorithms"):
            if name.startswith(POLICY_PREFIX):
                read_policy_file(Path(name.removeprefix(POLICY_PREFIX)))
            elif split_name(name)[0] == "hierarchical" and max(self.nnodes, self.config.parallel.nodes) == 1:
                raise ValueError(f"{name} on one node is two-shot; give --nodes, as --tp 4 --nodes 2")

    @classmethod
    def from_argv(cls, argv: Sequence[str], *, verb: str) -> Self:
        """The options include those of the server."""
        parser = make_parser(f"bench {verb}", f"{cls.description} {LAST_LINE}", GROUPS)
        add_flags(parser.add_argument_group("bench", "AllReduces, prompts and repeats."), cls.fields())
        flags = {word.partition("=")[0] for word in argv}
        argv = argv if flags & {"--tp", "--config"} else ["--tp", str(_RANKS), *argv]
        config, given = parse(parser, argv, GROUPS)
        refuse_serving_flags(parser, config)
        if {"layouts", "algorithms"} <= vars(given).keys():
            parser.error("--layouts and --algorithms are two comparisons; give one of them")
        for name in _OURS.keys() & vars(given).keys():
            parser.error(f"{flag_of(name)} is not for this bench: {_OURS[name]}")
        return make_options(cls, parser, given, config=config)


def to_argv(config: ServeConfig, groups: Sequence[str], leave_out: Collection[str] = ()) -> list[str]:
    """Flags for every option of ``groups`` that is not at its default."""
    argv: list[str] = []
    for name, (group, own) in option_fields().items():
        value = getattr(getattr(config, group), name)
        if group in groups and name not in leave_out and value != own.default:
            argv.extend(_flag(name, value, own))
    return argv


def _flag(name: str, value: object, own: Field[Any]) -> list[str]:
    flag = flag_of(name)
    if isinstance(value, bool):
        return [flag if value else f"--no-{flag.removeprefix('--')}"]
    if isinstance(value, (tuple, list)):
        parts = [_number(part) for part in value]
        return [flag, *parts] if own.metadata["nargs"] else [flag, ",".join(parts)]
    return [flag, f"{value}B" if own.metadata["metavar"] == "BYTES" else _number(value)]


def _number(value: object) -> str:
    return f"{value:.15g}" if isinstance(value, float) else str(value)
