"""``tightwire bench lab plan``: predictions of layouts beside measurements on network namespaces."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from tightwire.bench.hosts import EmulatedHosts
from tightwire.bench.lab.peers.process import Load, bench_serve
from tightwire.bench.options import OutputOptions, known_model
from tightwire.bench.report.table import Column, Table
from tightwire.bench.run import Bench
from tightwire.bench.server_process import ServerFailedError, ServerProcess
from tightwire.comm.all_reduce.names import split_name
from tightwire.option import option
from tightwire.server.plan.layout_times import CROWD, CROWD_PROMPT, CROWD_TOKENS, PROMPTS

_LAYOUTS, _EXPLAIN_S = ("tensor", "hybrid", "pipeline"), 600.0


def _known_row(text: str) -> str:
    layout, _, all_reduce = text.partition(", ")
    if layout not in _LAYOUTS:
        raise ValueError(f"must begin with one of {', '.join(_LAYOUTS)}, as in 'tensor, auto', got {text!r}")
    split_name(all_reduce or "auto")
    return text


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanOptions(OutputOptions):
    description: ClassVar[str] = "Serve on emulated hosts and compare with `tightwire explain --hosts N --network`."
    model: str = option("smollm2-135m", "the model", flag="model", parse=known_model)
    hosts: int = option(2, "hosts, each with its share of the cores", least=2)
    link: str = option("200mbit", "rate between the hosts", metavar="LINK")
    prompt_lens: tuple[int, ...] = option((128, 512), "prompts to measure, some of 128, 512 and 4096", metavar="N,N")
    row: str = option("tensor, auto", "the row of the table that --serve makes", metavar="ROW", parse=_known_row)
    serve: tuple[str, ...] = option((), "a flag of `serve`, as --serve=--overlap=off", metavar="FLAG", repeated=True)

    def __post_init__(self) -> None:
        if unknown := set(self.prompt_lens) - set(PROMPTS):
            raise ValueError(f"--prompt-lens takes {', '.join(map(str, PROMPTS))}, got {min(unknown)}")


class PlanBench(Bench[PlanOptions]):
    verb = "plan"
    later_tokens = 23  # of a request whose times are measured
    of_lab = True
    columns = (Column("of", "name"), *(Column(name, name, ",.4g") for name in ("predicted", "measured", "ratio")))
    failures = ((ServerFailedError, 1), (ValueError, 2), (subprocess.SubprocessError, 1))

    def measure(self) -> None:
        model, num, layout = self.options.model, self.options.hosts, self.options.row.split(",")[0]
        with EmulatedHosts(self.options.link, num) as hosts, hosts.visiting(), tempfile.TemporaryDirectory() as folder:
            argv = [model, "--layout", layout, "--tp", str(num), "--prefix-cache", "none", *self.options.serve]
            command, others = hosts.serve(argv)
            with ServerProcess(command, {}, log=Path(folder) / "server.log", others=others) as server:
                server.wait_ready("/health/ready", 120.0)
                found = dict(self._measured(server.url))
            explain = [sys.executable, "-m", "tightwire", "explain", model, "--hosts", str(num), "--network", "--json"]
            told = subprocess.run(hosts.on(0, explain), stdout=subprocess.PIPE, check=True, timeout=_EXPLAIN_S).stdout
        plan = json.loads(told)
        self.facts |= {"link": plan["link"], "rates": plan["rates"], "hosts": num, "serve": list(self.options.serve)}
        rows = [row["times"] for row in plan["layouts"]]
        named = {", ".join(filter(None, (row["layout"], row["all_reduce"]))): row for row in rows}
        if (times := named.get(self.options.row)) is None:
            raise ValueError(f"--row {self.options.row!r}: --serve makes the rows {', '.join(map(repr, named))}")
        predicted = {f"TTFT({length}) ms": 1e3 * seconds for length, seconds in times["ttft_s"].items()}
        token_s = times["token_s"] + times["handed_s"] / self.later_tokens  # the mean; the first of them waits
        predicted |= {"ms a token": 1e3 * token_s, f"tokens/s of {CROWD}": times["crowd_tokens_per_s"]}
        for name, value in found.items():
            own = {"name": name, "predicted": predicted[name], "measured": value, "ratio": predicted[name] / value}
            self.measured.append({**own, "samples": {}})
        self.print_table(Table(title=self.options.row, columns=self.columns, rows=self.measured))

    def _measured(self, url: str) -> Iterator[tuple[str, float]]:
        def load(at_once: int, num: int, size: int, output: int) -> dict[str, Any]:
            own = Load(concurrency=(at_once,), num_requests=(num,), input_len=size, output_len=output)
            return bench_serve(url, own, seed=1)["cells"][0]

        asked, output = self.options.prompt_lens, 1 + self.later_tokens
        cells = {length: load(1, 3 if length < 1000 else 1, length, output) for length in asked}
        for length, cell in cells.items():
            yield f"TTFT({length}) ms", 1e3 * cell["ttft_s"]["p50"]
        yield "ms a token", 1e3 * cells[asked[-1]]["tpot_s"]["p50"]
        yield f"tokens/s of {CROWD}", load(CROWD, CROWD, CROWD_PROMPT, CROWD_TOKENS)["output_tokens_per_s"]
