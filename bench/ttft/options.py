"""The options of ``tightwire bench ttft``: one frozen value, checked where it is born, and its command line.

The server's own options (model, ranks, link, engine) are flags of ``serve`` and are handed to the server that is measured.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tightwire.bench.report.label import check_label
from tightwire.bench.report.result_files import add_flags
from tightwire.comm.all_reduce.names import split_all_reduce_names
from tightwire.comm.all_reduce.registry import describe_all_reduce_names, parse_all_reduce
from tightwire.server.config.flags import make_parser, parse, refuse_replicas
from tightwire.server.config.parallel import POLICY_PREFIX, ParallelOptions
from tightwire.server.config.serve import ServeConfig

GROUPS = ("model", "parallel", "engine")
_ALGORITHMS = ("native", "ring", "two-shot", "flash-int8", "flash-int6", "flash-int4")
_OURS = ("allreduce", "allreduce_extra", "comm_policy")  # flags of serve that --algorithms stands for
_RANKS = 2  # unless --tp or a file says otherwise: one rank has nothing to sum


@dataclass(frozen=True, kw_only=True, slots=True)
class TtftOptions:
    """``config`` is the server's, with nothing said yet of what it sums with."""

    config: ServeConfig = field(default_factory=lambda: ServeConfig(parallel=ParallelOptions(tp=_RANKS)))
    algorithms: tuple[str, ...] = _ALGORITHMS
    baseline: str | None = None  # None: the first lossless one
    prompt_lens: tuple[int, ...] = (128, 512, 2048)
    concurrency: tuple[int, ...] = (1, 4)
    repeats: int = 6
    output_len: int = 8
    answers: int = 1  # checked of each arm in each cell
    error_budget: float | None = None
    output: Path | None = None
    label: str = "ttft"

    def __post_init__(self) -> None:
        tp = self.config.parallel.tp
        if tp < 2:
            raise ValueError(f"--tp must be at least 2, got {tp}: a single rank sums nothing")
        if len(self.algorithms) < 2:
            raise ValueError(
                f"--algorithms names at least two to compare, got {', '.join(self.algorithms) or 'none'}; the same one "
                "twice shows how far a comparison can be trusted"
            )
        for name in self.algorithms:
            self._check_algorithm(name)
        if self.baseline is not None and self.baseline not in self.algorithms:
            raise ValueError(
                f"--baseline must be one of --algorithms ({', '.join(self.algorithms)}), got {self.baseline}"
            )
        if self.baseline is None and self._first_lossless() is None:
            raise ValueError(
                f"--algorithms {','.join(self.algorithms)} names no lossless one to compare with: add one, such as "
                "two-shot, or say which of these is the --baseline"
            )
        for flag, values in (("--prompt-lens", self.prompt_lens), ("--concurrency", self.concurrency)):
            if not values or min(values) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{flag} takes unlike whole numbers of at least 1, got {','.join(map(str, values))}")
        if self.repeats < 2:
            raise ValueError(f"--repeats must be at least 2, got {self.repeats}: one value has no interval")
        for flag, value, least in (("--output-len", self.output_len, 2), ("--answers", self.answers, 1)):
            if value < least:
                raise ValueError(f"{flag} must be at least {least}, got {value}")
        if self.error_budget is not None and not 0 < self.error_budget < 1:
            raise ValueError(f"--error-budget must be above 0 and below 1, got {self.error_budget}")
        if max(self.concurrency) > self.config.engine.max_num_seqs:
            raise ValueError(
                f"--concurrency {max(self.concurrency)} is more than the {self.config.engine.max_num_seqs} sequences of a "
                "step, so the queue would be measured; raise --max-num-seqs"
            )
        check_label(self.label)

    @property
    def baseline_name(self) -> str:
        """The algorithm that the others are compared with."""
        name = self.baseline or self._first_lossless()
        assert name is not None, "checked at birth"
        return name

    def _first_lossless(self) -> str | None:
        return next((name for name in self.algorithms if not is_policy(name) and parse_all_reduce(name).lossless), None)

    def _check_algorithm(self, name: str) -> None:
        if is_policy(name):
            if not Path(policy_path(name)).is_file():
                raise ValueError(f"--algorithms {name}: there is no such file")
            return
        try:
            parse_all_reduce(name)
        except ValueError as error:
            raise ValueError(f"--algorithms: {error}") from None
        if name.startswith("hierarchical") and self.config.parallel.nodes == 1:
            raise ValueError(
                f"--algorithms {name}: the ranks are on one node, where it is two-shot; give --nodes, such as "
                "--tp 4 --nodes 2"
            )


def is_policy(name: str) -> bool:
    """Whether an arm is a comm-policy file rather than an AllReduce's name."""
    return name.startswith(POLICY_PREFIX)


def policy_path(name: str) -> str:
    return name.removeprefix(POLICY_PREFIX)


def parse_options(argv: Sequence[str]) -> TtftOptions:
    """Read the command line; prints what is wrong and exits with status 2 when it is."""
    parser = make_parser(
        "bench ttft",
        "Compare AllReduces in time to first token on one server that is started for it. The last line of stdout is one "
        "JSON object.",
        GROUPS,
    )
    _add_flags(parser)
    said = {word.partition("=")[0] for word in argv}
    argv = argv if said & {"--tp", "--config"} else ["--tp", str(_RANKS), *argv]
    config, given = parse(parser, argv, GROUPS)
    refuse_replicas(parser, config)
    for name in _OURS:
        if name in given:
            parser.error(f"--{name.replace('_', '-')} is not for this bench; --algorithms says what is compared")
    if "prefix_cache" in given:
        parser.error(
            "--prefix-cache is not for this bench, whose prompts are all computed; `bench serve` has workloads for it"
        )
    own = {name: getattr(given, name) for name in TtftOptions.__slots__ if name != "config" and hasattr(given, name)}
    try:
        return TtftOptions(config=config, **own)
    except ValueError as error:
        parser.error(str(error))


def _add_flags(parser: argparse.ArgumentParser) -> None:
    defaults = TtftOptions()
    group = parser.add_argument_group("bench", "What is compared, on which prompts, how often.")
    add = group.add_argument
    add(
        "--algorithms",
        type=split_all_reduce_names,
        metavar="NAME,NAME",
        help=f"of {describe_all_reduce_names()}, or policy:FILE ({','.join(defaults.algorithms)})",
    )
    add("--baseline", metavar="NAME", help="the one that the others are compared with (the first lossless one)")
    add("--prompt-lens", type=_integers, metavar="N,N", help=f"prompt tokens ({_list(defaults.prompt_lens)})")
    add("--concurrency", type=_integers, metavar="N,N", help=f"requests at a time ({_list(defaults.concurrency)})")
    add("--repeats", type=int, metavar="N", help=f"random blocks, in each of which every one runs ({defaults.repeats})")
    add("--output-len", type=int, metavar="N", help=f"tokens to generate, at least 2 ({defaults.output_len})")
    add("--answers", type=int, metavar="N", help=f"timed answers to check of each cell and one ({defaults.answers})")
    add(
        "--error-budget",
        type=float,
        metavar="E",
        help="recommend none whose relative RMS error is above this (no limit; the error is stated)",
    )
    add_flags(group, "ttft")


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected whole numbers with commas between, such as 128,512, got {text!r}"
        ) from None


def _list(values: Sequence[int]) -> str:
    return ",".join(map(str, values))
