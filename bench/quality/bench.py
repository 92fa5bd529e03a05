"""``tightwire bench quality``: measures the accuracy cost of quantized AllReduces; finds the cheapest within a budget.

Every arm is compared with the exact model of the same number of ranks: same shards, same dtype, lossless sums. An
interrupted run keeps its measurements.
"""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tightwire.bench.quality import report
from tightwire.bench.quality.arms import MIX
from tightwire.bench.quality.measure import Measured, Measurement, Scorer, make_pool
from tightwire.bench.quality.options import QualityOptions, cheapest_inside, parse_options
from tightwire.bench.quality.page import make_sections
from tightwire.bench.quality.ranks import NEW_TOKENS, NUM_PROMPTS, PROMPT_TOKENS, PlayedRanks
from tightwire.bench.quality.search import FoundMix, budget_policy, find_mix, mix_against
from tightwire.bench.quality.setting import Setting, make_setting
from tightwire.bench.quality.summary import exact_row, make_rows, window_samples
from tightwire.bench.report.html import Section
from tightwire.bench.report.progress import paused
from tightwire.bench.report.table import Metric, Table
from tightwire.bench.run import Bench
from tightwire.comm.policy.policy_file import PolicyFile, write_policy_file
from tightwire.model.checkpoint.errors import ModelError

_NUM_THREADS = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main(argv: Sequence[str]) -> int:
    """Return 0, 1 if the run failed, 2 for bad options, 130 after Ctrl-C."""
    return QualityBench(parse_options(argv)).run()


class QualityBench(Bench):
    verb = "quality"
    metrics = tuple(Metric(name=name, unit="nats", better="better", worse="worse") for name in ("kl", "nll"))
    pairing_keys = ("text", "model", "window")

    def __init__(self, options: QualityOptions) -> None:
        super().__init__(options)
        self._options = options
        self._setting: Setting | None = None
        self._mix: FoundMix | None = None
        self._measured: list[Measured] = []
        self._policy_file: str | None = None

    @property
    def failures(self) -> tuple[tuple[type[Exception], int], ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Before the measurement, errors mean bad options and exit with 2."""
        status = 2 if self._setting is None else 1
        return ((ValueError, status), (ModelError, status), (OSError, status))

    def measure(self) -> None:
        self._setting = make_setting(self._options)
        self.facts = {key: value for key, value in self._setting.facts.items() if key != "environment"}
        report.show_head(self.console, self.facts)
        self._measure(self._setting)

    def _measure(self, setting: Setting) -> None:
        with self.progress, make_pool(_NUM_THREADS) as pool:
            self._task = self.progress.add_task("loading", total=None)
            for world_size in self._options.world_sizes:
                with self._open_ranks(setting, world_size) as ranks:
                    if self._options.search is not None and self._mix is None:
                        self._mix = find_mix(setting, ranks, pool, self._told)
                        if self._options.budget is None:  # with a budget, the choice needs all arms
                            self._write_policy(self._mix.file)
                    self._measure_ranks(setting, ranks, pool)
                self.progress.reset(self._task, total=None)
        if self._options.budget is not None and self._options.write_policy is not None:
            self._write_policy(self._chosen_file(setting))

    def _open_ranks(self, setting: Setting, world_size: int) -> PlayedRanks:
        options = self._options
        return PlayedRanks(
            setting.checkpoint,
            world_size,
            dtype=setting.dtype,
            formats=setting.formats,
            num_sequences=max(options.batch, NUM_PROMPTS),
            max_tokens=max(options.window, min(options.window, PROMPT_TOKENS) + NEW_TOKENS),
        )

    def _measure_ranks(self, setting: Setting, ranks: PlayedRanks, pool: ThreadPoolExecutor) -> None:
        measurement = Measurement(
            ranks=ranks,
            windows=setting.windows,
            arms=[*setting.arms, *([] if self._mix is None else [self._mix.arm])],
            scorer=Scorer(ranks.head_VD, pool),
            batch=self._options.batch,
            told=lambda what: self._told(f"{ranks.world_size} ranks: {what}"),
        )
        measured = Measured(world_size=ranks.world_size)
        self._measured.append(measured)
        self.progress.reset(self._task, total=measurement.num_steps)
        for _ in measurement.run(measured):
            if len(self._measured) == 1 and not measured.scores:
                seconds = measurement.seconds_left() * len(self._options.world_sizes)
                with paused(self.progress):
                    report.show_estimate(self.console, seconds, _NUM_THREADS)
            else:
                self.keep()
        with paused(self.progress):
            report.show_world_size(self.console, self.result("not finished"), ranks.world_size)

    def _told(self, what: str) -> None:
        self.progress.update(self._task, description=what, advance=1)

    def _write_policy(self, file: PolicyFile) -> None:
        if (path := self._options.write_policy) is not None:
            write_policy_file(path, file)
            self._policy_file = str(path)

    def _chosen_file(self, setting: Setting) -> PolicyFile:
        """The policy file of the cheapest arm within the budget.

        Raises:
            ValueError: no arm is within the budget.
        """
        choice = self._choice()
        if choice is None or choice["algorithm"] is None:
            raise ValueError("--write-policy: nothing is inside the --budget; give a larger one, or other --algorithms")
        if self._mix is not None and choice["algorithm"] == MIX:
            return self._mix.file
        return budget_policy(setting, choice["algorithm"], self._rows(setting))

    def _rows(self, setting: Setting) -> list[dict[str, Any]]:
        arms = [*setting.arms, *([] if self._mix is None else [self._mix.arm])]
        return [row for measured in self._measured for row in make_rows(measured, arms, setting)]

    def _choice(self) -> dict[str, Any] | None:
        budget = self._options.budget
        if budget is None or self._setting is None:
            return None
        served = {arm.name for arm in self._setting.arms if arm.weight_codec == "none"} | {MIX}
        if not (rows := [row for row in self._rows(self._setting) if row["algorithm"] in served]):
            return None
        sizes = sorted({row["world_size"] for row in rows})
        return {"budget": budget.text, "world_sizes": sizes, "algorithm": cheapest_inside(rows, budget)}

    def cells(self) -> list[dict[str, Any]]:
        if (setting := self._setting) is None:
            return []
        samples = {
            (measured.world_size, name): window_samples(measured, name, setting.windows.num_scored)
            for measured in self._measured
            for name in measured.scores
        }
        cells = []
        for row in self._rows(setting):
            own = samples[row["world_size"], row["algorithm"]]
            kept = {name: values for name, values in own.items() if name == "nll" or (name == "kl" and any(values))}
            name = f"{row['algorithm']}, {row['world_size']} ranks"
            cells.append({"name": name, **row, "samples": kept})
        return cells

    def result(self, error: str | None) -> dict[str, Any]:
        known, setting = [measured for measured in self._measured if measured.scores], self._setting
        result = super().result(error)
        return result | {
            "exact": [exact_row(measured) for measured in known],
            "mix_against": [
                found
                for measured in known
                if setting is not None
                for found in mix_against(
                    measured,
                    [row for row in result["cells"] if row["world_size"] == measured.world_size],
                    setting.windows.num_scored,
                )
            ],
            "choice": self._choice(),
            "search": None if self._mix is None else self._mix.facts,
            "policy_file": self._policy_file,
        }

    def csv(self, result: Mapping[str, Any]) -> Table:
        return report.csv_table(result)

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return f"What quantized AllReduces cost {result['model']}", report.describe_setting(result)

    def sections(self, result: Mapping[str, Any]) -> list[Section]:
        return make_sections(result)

    def show_end(self, result: Mapping[str, Any]) -> None:
        if result["cells"]:
            report.show_findings(self.console, result)
