"""``tightwire bench serve``: puts load on a running server and measures it as its clients would.

Steps: reach the server, fit synthetic prompts to the wanted length by the server's own count, then for each load
warm up, measure, print, keep. What was measured is kept whatever comes after: a dead server, Ctrl-C.
"""

import asyncio
import json
import re
import sys
from collections.abc import Sequence
from typing import Any

import httpx
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from tightwire.server.bench.client import BenchClient
from tightwire.server.bench.environment import describe_environment
from tightwire.server.bench.serve import report
from tightwire.server.bench.serve.load import Arm, run_arm
from tightwire.server.bench.serve.options import ServeBenchOptions, parse_options
from tightwire.server.bench.serve.summary import doubts, summarize
from tightwire.server.bench.serve.workload import FileWorkload, Prompt, SyntheticWorkload, Workload
from tightwire.server.remote import Remote, RemoteError, connect

_FIT_ATTEMPTS = 6
STARTUP_METRIC = re.compile(r"^tightwire_startup_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when there is nothing usable or a load was cut short, 2 for bad options, 130 after Ctrl-C."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    run = ServeBench(options)
    try:
        return run.run()
    except (RemoteError, ValueError) as error:
        sys.stderr.write(f"tightwire bench serve: {error}\n")
        run.last_line(error=str(error))
        return 1


class ServeBench:
    """One run: its options, the server it talks to, and the arms measured so far."""

    def __init__(self, options: ServeBenchOptions) -> None:
        self._options = options
        self._arms: list[Arm] = []
        self._summaries: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._files: report.ResultFiles | None = None
        self._console = Console(highlight=False)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
            disable=not sys.stderr.isatty(),
        )

    def run(self) -> int:
        options = self._options
        if options.output is not None:
            self._files = report.ResultFiles(options.output, options.label)
        workload = self._workload()
        remote = connect(options.url, model=options.model, api_key=options.api_key)
        self._facts = {
            "server": {"url": remote.base, "model": remote.model, "startup_s": startup_seconds(remote)},
            "workload": {"name": workload.name, "seed": options.seed, "output_len": options.output_len},
            "request": options.body(),
            "environment": describe_environment(),
        }
        try:
            with self._progress:
                asyncio.run(self._measure(remote, workload))
        except KeyboardInterrupt:
            if self._arms and self._arms[-1].stopped is None and len(self._summaries) < len(self._arms):
                self._arms[-1].stopped = "interrupted"
                self._finish(self._arms[-1], None)
            self.last_line(error="interrupted")
            return 130
        failure = self._failure()
        if failure:
            sys.stderr.write(f"tightwire bench serve: {failure}\n")
        self.last_line(error=failure)
        return 1 if failure else 0

    def _workload(self) -> SyntheticWorkload | FileWorkload:
        options = self._options
        if options.prompts is not None:
            return FileWorkload(options.prompts, output_len=options.output_len, reuse=options.reuse_prompts)
        return SyntheticWorkload(
            num_words=options.input_len, output_len=options.output_len, seed=options.seed, chat=options.chat
        )

    async def _measure(self, remote: Remote, workload: Workload) -> None:
        options = self._options
        async with BenchClient(remote, timeout_s=options.timeout_s, extra_body=options.body()) as client:
            if isinstance(workload, SyntheticWorkload):
                await fit_prompt_length(client, workload, options.input_len)
                self._facts["workload"] |= {"input_len": options.input_len, "num_words": workload.num_words}
            self._show_head()
            # All prompts are taken first: too few of them is known before an hour of measuring, not after.
            shares = [
                (workload.take(options.warmups_of(i)), workload.take(options.requests_of(i)))
                for i in range(len(options.loads))
            ]
            for i, (warmups, prompts) in enumerate(shares):
                arm = Arm(load=options.loads[i], num_requests=len(prompts))
                self._arms.append(arm)
                await self._measure_arm(client, arm, warmups, prompts)
                if arm.stopped:
                    return

    async def _measure_arm(
        self, client: BenchClient, arm: Arm, warmups: Sequence[Prompt], prompts: Sequence[Prompt]
    ) -> None:
        seed = self._options.seed
        warm = Arm(load=arm.load, num_requests=len(warmups))
        task = self._progress.add_task(f"{arm.load.name}, warm-up", total=len(warmups))
        if warmups:
            await run_arm(warm, warmups, client.measure, seed=seed, done=lambda: self._progress.advance(task))
        if warm.samples and all(sample.error for sample in warm.samples):
            arm.stopped = f"every warm-up request failed; the last: {warm.samples[-1].error}"
        else:
            self._progress.update(task, description=arm.load.name, total=len(prompts), completed=0)
            await run_arm(arm, prompts, client.measure, seed=seed, done=lambda: self._progress.advance(task))
        self._progress.remove_task(task)
        expected = [prompt.max_tokens for prompt in prompts] if self._options.ignore_eos else None
        self._finish(arm, expected)

    def _finish(self, arm: Arm, expected_generated: Sequence[int] | None) -> None:
        summary = summarize(arm)
        self._summaries.append(summary)
        report.show(self._console, summary, doubts(arm, expected_generated))
        if self._files is not None:
            self._files.write(self._result(), self._arms)

    def _failure(self) -> str | None:
        for summary in self._summaries:
            if summary["stopped"]:
                return f"{summary['load']} stopped early: {summary['stopped']}"
            if not summary["succeeded"]:
                return f"{summary['load']}: all requests failed: {'; '.join(summary['errors'])}"
        return None

    def _show_head(self) -> None:
        server, workload = self._facts["server"], self._facts["workload"]
        lengths = f", {workload['input_len']} prompt tokens" if "input_len" in workload else ""
        self._console.print(
            f"{server['model']} at {server['url']}: {workload['name']} prompts{lengths}, "
            f"{workload['output_len']} output tokens, seed {workload['seed']}",
            markup=False,
            soft_wrap=True,
        )
        if server["startup_s"] is not None:
            self._console.print(f"the server was ready {server['startup_s']:.2f} s after its start")
        self._console.print()

    def _result(self) -> dict[str, Any]:
        files = self._files.paths if self._files is not None else []
        return {"schema": report.SCHEMA, **self._facts, "arms": self._summaries, "files": files}

    def last_line(self, *, error: str | None = None) -> None:
        """The whole result on one line, without raw samples; ``error`` says why it is not complete."""
        sys.stdout.write(json.dumps({**self._result(), "error": error}) + "\n")
        sys.stdout.flush()


async def fit_prompt_length(client: BenchClient, workload: SyntheticWorkload, input_len: int) -> None:
    """Set ``workload.num_words`` so that the server counts ``input_len`` prompt tokens, chat template included.

    Raises:
        RemoteError: the server refuses the prompt, or no number of words comes within 2 % of the length.
    """
    counted, tokens_per_word = 0, 1.0
    tried: tuple[int, int] | None = None
    for attempt in range(_FIT_ATTEMPTS):
        sample = await client.measure(workload.probe(attempt))
        if sample.error:
            raise RemoteError(f"a trial request failed: {sample.error}")
        words, counted = workload.num_words, sample.num_prompt
        if not sample.usage or counted == input_len:
            return
        if words == 1 and counted > input_len:
            raise RemoteError(f"one word is already {counted} prompt tokens here, more than --input-len {input_len}")
        # The slope between two trials leaves out the template's own tokens; near ones would only give noise.
        if tried is None:
            tokens_per_word = counted / words
        elif abs(words - tried[0]) > 2:
            tokens_per_word = (counted - tried[1]) / (words - tried[0])
        tried = words, counted
        workload.num_words = max(1, words + round((input_len - counted) / max(1.0, tokens_per_word)))
    if abs(counted - input_len) > max(2, 0.02 * input_len):
        raise RemoteError(f"cannot make prompts of {input_len} tokens for this server; the nearest had {counted}")


def startup_seconds(remote: Remote) -> float | None:
    """Seconds from the server's start until it was ready, where it says so in /metrics."""
    try:
        page = httpx.get(f"{remote.root}/metrics", timeout=remote.timeout(5.0), trust_env=remote.trust_env)
    except httpx.HTTPError:
        return None  # a peer without metrics
    found = STARTUP_METRIC.search(page.text) if page.status_code == 200 else None
    return float(found.group(1)) if found else None
