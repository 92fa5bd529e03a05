"""``tightwire bench quality``: measures the accuracy cost of quantized AllReduces; finds the cheapest within a budget."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tightwire.bench.quality import report
from tightwire.bench.quality.measure import Measured, make_pool, measure_arms, num_steps
from tightwire.bench.quality.options import QualityOptions, is_compared
from tightwire.bench.quality.ranks import ThreadRanks, ranks_of
from tightwire.bench.quality.search import arm_policy_file, find_mix, num_search_steps
from tightwire.bench.quality.setting import MIX, PLAIN_WEIGHTS, Arm, Setting, file_arm, make_setting
from tightwire.bench.report.page import Item
from tightwire.bench.report.table import Metric
from tightwire.bench.run import Bench, BenchFailedError
from tightwire.comm.group.host import num_cores
from tightwire.comm.policy.rules import PolicyFile, write_policy_file


class QualityBench(Bench[QualityOptions]):
    verb = "quality"
    metrics = tuple(Metric(name=name, unit="nats", better="better", worse="worse") for name in ("kl", "nll"))
    columns = report.CSV_COLUMNS
    pairing_keys = ("text", "model", "window")
    failures = ((ValueError, 2), (OSError, 2))

    def __init__(self, options: QualityOptions) -> None:
        super().__init__(options)
        self._setting: Setting | None = None
        self._mix: PolicyFile | None = None
        self._search: dict[str, Any] | None = None
        self._measured: list[Measured] = []
        self._policy_file: str | None = None

    def measure(self) -> None:
        setting = self._setting = make_setting(self.options)
        self.facts = setting.facts()
        self.print(report.describe_setting(self.facts), report.LEGEND, "")
        try:
            with self.progress, make_pool(num_cores()) as pool:
                num_arms = len(setting.arms) + (self.options.search is not None)
                total = len(self.options.world_sizes) * num_steps(setting, num_arms)
                total += 0 if self.options.search is None else num_search_steps(setting)
                self._task = self.progress.add_task("loading", total=total)
                for world_size in self.options.world_sizes:
                    with ranks_of(setting, world_size) as ranks:
                        self._measure_ranks(setting, ranks, pool)
            self._write_policy(setting)
        except (ValueError, OSError) as error:
            raise BenchFailedError(str(error)) from error

    def _measure_ranks(self, setting: Setting, ranks: ThreadRanks, pool: ThreadPoolExecutor) -> None:
        def show(step: str) -> None:
            self.progress.update(self._task, description=f"{ranks.world_size} ranks: {step}", advance=1)

        if self.options.search is not None and self._mix is None:
            self._mix, self._search = find_mix(setting, ranks, pool, show)
        measured = Measured(world_size=ranks.world_size)
        self._measured.append(measured)
        for _ in measure_arms(setting, ranks, self._arms(setting), pool, measured, show):
            self.keep()
        self.print_table(report.world_size_table(self.result("not finished"), ranks.world_size))

    def _arms(self, setting: Setting) -> list[Arm]:
        return [*setting.arms, *([] if self._mix is None else [file_arm(MIX, self._mix, setting.config)])]

    def _write_policy(self, setting: Setting) -> None:
        """Write the policy file of the cheapest arm within the budget, or of the mix if there is no budget."""
        if (path := self.options.write_policy) is None:
            return
        file, choice = self._mix, self._choice()
        if choice is not None:
            if choice["algorithm"] is None:
                raise ValueError("--write-policy: nothing is within --budget; raise it, or add --algorithms")
            chosen = next(arm for arm in self._arms(setting) if arm.name == choice["algorithm"])
            file = self._mix if chosen.name == MIX else arm_policy_file(setting, chosen, self.cells())
        assert file is not None, "there is a budget or a search"
        write_policy_file(path, file)
        self._policy_file = str(path)

    def _choice(self) -> dict[str, Any] | None:
        """The cheapest arm within the budget; None without a budget or before the first cell."""
        budget = self.options.budget
        if budget is None or self._setting is None:
            return None
        arms = (arm for arm in self._arms(self._setting) if not is_compared(arm.name) and "@" not in arm.name)
        served = {arm.name for arm in arms if arm.weights == PLAIN_WEIGHTS and arm.kv_dtype is None}
        if not (rows := [row for row in self.cells() if row["algorithm"] in served]):
            return None
        sizes = sorted({row["world_size"] for row in rows})
        return {"budget": budget.text, "world_sizes": sizes, "algorithm": budget.cheapest(rows)}

    def cells(self) -> list[dict[str, Any]]:
        if (setting := self._setting) is None:
            return []
        arms = self._arms(setting)
        return [row for measured in self._measured for row in report.make_rows(measured, arms, setting)]

    def result(self, error: str | None) -> dict[str, Any]:
        return super().result(error) | {
            "choice": self._choice(),
            "search": self._search,
            "policy_file": self._policy_file,
        }

    def title(self, result: Mapping[str, Any]) -> tuple[str, str]:
        return f"Accuracy cost of quantized AllReduces: {result['model']}", report.describe_setting(result)

    def sections(self, result: Mapping[str, Any]) -> list[Item]:
        return report.make_sections(result)

    def show_end(self, result: Mapping[str, Any]) -> None:
        self.print(*report.findings(result), style="bold")
