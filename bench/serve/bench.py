"""``tightwire bench serve``: puts load on a running server and measures it as its clients would.

Steps: reach the server, find out which fields it takes, fit prompts to the wanted length by the server's own count, then
for each load warm up, measure, print, keep. What was measured is kept whatever comes after: a dead server, Ctrl-C.
"""

import asyncio
import re
import sys
from collections.abc import Sequence
from typing import Any

import httpx

from tightwire.bench.client import BenchClient
from tightwire.bench.ending import finish, say
from tightwire.bench.report.console import make_console
from tightwire.bench.report.environment import describe_environment, without_password
from tightwire.bench.report.progress import paused, progress_bar
from tightwire.bench.report.result_files import ResultFiles
from tightwire.bench.serve import report
from tightwire.bench.serve.fit import fit_prompt_length, fit_scale, send_what_is_understood
from tightwire.bench.serve.load import Arm, run_arm
from tightwire.bench.serve.options import ServeBenchOptions, Workload, parse_options
from tightwire.bench.serve.summary import doubts, summarize
from tightwire.bench.serve.workload import FileWorkload, Prompt, SyntheticWorkload
from tightwire.server.cli.remote import Remote, RemoteError, connect

_WITHOUT = {
    "ignore_eos": "answers may end before their length, so rates of unlike servers count unlike answers",
    "stream_options": "it may not tell how many tokens there were; then events with text are counted",
}
STARTUP_METRIC = re.compile(r"^tightwire_startup_seconds(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, 1 when there is nothing usable or a load was cut short, 2 for bad options, 130 after Ctrl-C."""
    options = parse_options(sys.argv[1:] if argv is None else argv)
    run = ServeBench(options)
    try:
        return run.run()
    except (RemoteError, ValueError) as error:
        say("serve", str(error))
        run.finish(str(error))
        return 1


class ServeBench:
    """One run: its options, the server it talks to, and the arms measured so far."""

    def __init__(self, options: ServeBenchOptions) -> None:
        self._options = options
        self._arms: list[Arm] = []
        self._summaries: list[dict[str, Any]] = []
        self._facts: dict[str, Any] = {}
        self._files: ResultFiles | None = None
        self._console = make_console()
        self._progress = progress_bar()

    def run(self) -> int:
        options = self._options
        if options.output is not None:
            self._files = ResultFiles(options.output, options.label)
        workload = options.make_workload()
        remote = connect(options.url, model=options.model, api_key=options.api_key)
        self._facts = {
            "server": {
                "url": without_password(remote.base),
                "model": remote.model,
                "startup_s": startup_seconds(remote),
                "refused": [],
            },
            "workload": {"name": workload.name, "seed": options.seed},
            "environment": describe_environment(),
        }
        try:
            with self._progress:
                asyncio.run(self._measure(remote, workload))
        except KeyboardInterrupt:
            if self._arms and self._arms[-1].stopped is None and len(self._summaries) < len(self._arms):
                self._arms[-1].stopped = "interrupted"
                self._close(self._arms[-1], None)
            self.finish("interrupted")
            return 130
        failure = self._failure()
        if failure:
            say("serve", failure)
        return 1 if self.finish(failure) else 0

    async def _measure(self, remote: Remote, workload: Workload) -> None:
        options = self._options
        async with BenchClient(remote, timeout_s=options.timeout_s, extra_body=options.body()) as client:
            trial = _trial(options.chat, workload)
            body, refused = await send_what_is_understood(client, options.body(), trial)
            self._facts["server"]["refused"], self._facts["request"] = refused, body
            self._facts["workload"] |= await _fitted(client, workload)
            with paused(self._progress):
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
            if arm.stopped is None and arm.samples[-1].error:
                arm.stopped = self._gone()
        self._progress.remove_task(task)
        expected = [prompt.max_tokens for prompt in prompts] if self._options.ignore_eos else None
        self._close(arm, expected)

    def _close(self, arm: Arm, expected_generated: Sequence[int] | None) -> None:
        found = doubts(arm, expected_generated)
        summary = {**summarize(arm, self._options.slo), "doubts": found}
        self._summaries.append(summary)
        with paused(self._progress):
            report.show(self._console, summary, found)
        if self._files is not None:
            report.keep_raw(self._files, self._result(), self._arms)

    def _gone(self) -> str | None:
        """Why the server cannot be reached any more; None where it can. It may die too late for many failures in a row."""
        options = self._options
        try:
            connect(options.url, model=options.model, api_key=options.api_key)
        except RemoteError as error:
            return str(error)
        return None

    def _failure(self) -> str | None:
        for summary in self._summaries:
            if summary["stopped"]:
                return f"{summary['load']} stopped early: {summary['stopped']}"
            if not summary["succeeded"]:
                return f"{summary['load']}: all requests failed: {'; '.join(summary['errors'])}"
        return None

    def _show_head(self) -> None:
        server, workload = self._facts["server"], self._facts["workload"]
        facts = ", ".join(f"{name} {value}" for name, value in workload.items() if name != "name")
        words = f"{server['model']} at {server['url']}: {workload['name']} prompts, {facts}"
        self._console.print(words, markup=False, soft_wrap=True)
        for name in server["refused"]:
            words = f"note: the server refuses {name}: {_WITHOUT[name]}"
            self._console.print(words, style="yellow", markup=False, soft_wrap=True)
        if server["startup_s"] is not None:
            self._console.print(f"the server was ready {server['startup_s']:.2f} s after its start")
        self._console.print()

    def _result(self, error: str | None = "not finished") -> dict[str, Any]:
        facts = {"schema": report.SCHEMA, "label": self._options.label, **self._facts}
        return {**facts, "arms": self._summaries, "error": error}

    def finish(self, error: str | None) -> str | None:
        """Keep and print what there is; what is wrong with the run at last."""
        return finish("serve", error, self._result, self._files if self._summaries else None, self._keep)

    def _keep(self, files: ResultFiles, error: str | None) -> None:
        report.keep(files, self._result(error), self._arms)


def _trial(chat: bool, workload: Workload) -> Prompt:
    """A prompt of the kind that will be sent, for one token."""
    chat = workload.has_chat if isinstance(workload, FileWorkload) else chat
    return Prompt(content=[{"role": "user", "content": "Hello"}] if chat else "Hello", max_tokens=1)


async def _fitted(client: BenchClient, workload: Workload) -> dict[str, Any]:
    """Fit prompts to their lengths; returns what the result says of them."""
    if isinstance(workload, FileWorkload):
        return {"prompts": len(workload)}
    if isinstance(workload, SyntheticWorkload):
        input_len = workload.num_words
        await fit_prompt_length(client, workload, input_len)
        return {"input_len": input_len, "output_len": workload.output_len, "num_words": workload.num_words}
    await fit_scale(client, workload)
    return {**workload.facts(), "tokens_per_word": workload.scale.tokens_per_word}


def startup_seconds(remote: Remote) -> float | None:
    """Seconds from the server's start until it was ready, where it says so in /metrics."""
    try:
        page = httpx.get(f"{remote.root}/metrics", timeout=remote.timeout(5.0), trust_env=remote.trust_env)
    except httpx.HTTPError:
        return None  # a peer without metrics
    found = STARTUP_METRIC.search(page.text) if page.status_code == 200 else None
    return float(found.group(1)) if found else None
