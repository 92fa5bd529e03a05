"""``tightwire tune --quality``: measures what quantized AllReduces cost a model, and writes the figures for ``serve``.

Ranks are threads of this process. Cost: a forward pass of all tokens for the exact model and each name, all ranks' weights.
"""

import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from tightwire.bench.quality.measure import Measured, make_pool, measure_arms
from tightwire.bench.quality.options import QualityOptions
from tightwire.bench.quality.ranks import ranks_of
from tightwire.bench.quality.report import COLUMNS, make_rows
from tightwire.bench.quality.setting import Setting, make_setting
from tightwire.bench.report.console import make_console, progress_bar
from tightwire.bench.report.table import Table, print_table
from tightwire.comm.all_reduce.make import parse_all_reduce
from tightwire.comm.group.host import num_cores
from tightwire.comm.policy.accuracy import AccuracyFile, Loss, write_accuracy
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.open import fingerprint, open_checkpoint
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan.comm_decision import policy_requests
from tightwire.whole_folder import cache_folder

_WINDOW = 512  # tokens
_SHOWN = ("algorithm", "bytes_share", "perplexity_delta", "perplexity_delta_reach", "kl_mean")


def run(config: ServeConfig, num_tokens: int) -> int:
    """Returns 0, 1 when the file cannot be written or a sum overflowed, 2 for refused options, 130 after Ctrl-C."""
    console, refused = make_console(), 2
    try:
        setting = _make_setting(config, num_tokens)
        refused = 1
        path = measure(setting, config.parallel.tp, console)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"tightwire tune: {error}\n")
        return refused
    except KeyboardInterrupt:
        sys.stderr.write("tightwire tune: interrupted; nothing was kept\n")
        return 130
    told = f"written to {path}; `serve --comm-error-budget kl=X` and `explain` use it"
    console.print(told, markup=False, soft_wrap=True)
    return 0


def measure(setting: Setting, num_ranks: int, console: Console) -> Path:
    """Measure the arms of ``setting``, print them and write the file; OSError: it cannot be written."""
    measured = Measured(world_size=num_ranks)
    batches = list(setting.batches(setting.windows.measured))
    with progress_bar() as progress, make_pool(num_cores()) as pool:
        task = progress.add_task("loading", total=len(batches))

        def show(name: str) -> None:
            progress.update(task, description=name)

        with ranks_of(setting, num_ranks) as ranks:
            for _ in measure_arms(setting, ranks, setting.arms, pool, measured, show, False):
                progress.advance(task)
    rows, facts = make_rows(measured, setting.arms, setting), setting.facts()
    title = f"{facts['model']} with {num_ranks} ranks: {facts['tokens']:,} tokens of {facts['text']}"
    columns = [column for column in COLUMNS if column.key in _SHOWN]
    print_table(console, Table(title=title, columns=columns, rows=rows))
    file = AccuracyFile(
        model=facts["model"],
        world_size=num_ranks,
        dtype=facts["dtype"],
        tokens=facts["tokens"],
        losses={row["algorithm"]: Loss(row["kl_mean"], row["perplexity_delta"]) for row in rows},
        date=datetime.now(UTC).isoformat(timespec="seconds"),
    )
    return write_accuracy(cache_folder(), fingerprint(setting.checkpoint), file)


def _make_setting(config: ServeConfig, num_tokens: int) -> Setting:
    """ValueError: the model, its split or an AllReduce is refused."""
    model = open_checkpoint(config.model.model, config.model.seed).config
    options = QualityOptions(
        model=config.model.model,
        algorithms=tuple(_names(config, model)),
        world_sizes=(config.parallel.tp,),
        tokens=num_tokens,
        window=min(_WINDOW, model.max_positions),
        # On the CPU float16 is computed in float32; messages of either type lose little in comparison with a codec.
        dtype="bfloat16" if config.model.dtype in ("auto", "bfloat16") else "float32",
        quantization=config.model.quantization,
        seed=config.model.seed,
    )
    return make_setting(options)


def _names(config: ServeConfig, model: LlamaConfig) -> list[str]:
    """The quantized names that ``auto`` considers, and those that the options name."""
    requests = policy_requests(config, model).values()
    names = [name for request in requests for name in (*request.lossy_names(), request.allreduce)]
    parsed = [parse_all_reduce(name) for name in dict.fromkeys(names)]
    return [name.name for name in parsed if not name.lossless and not name.needs_nodes]
