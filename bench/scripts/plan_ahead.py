"""How long a device would wait for the host between steps, with steps planned ahead (``--plan-ahead``) and without.

    python bench/scripts/plan_ahead.py [--step-ms 8] [--sequences 1,16,64] [--steps 400]

The engine, scheduler, sampler and messages are the real ones. The device is played: it takes each step that it is handed in
turn, needs ``--step-ms`` for it, and its tokens are there when that is over. What is measured is how long it has nothing to
do between the end of a step and the next one that it is handed. A GPU's launches, which take a host's time too, are not
played.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from tightwire.comm.ledger.ledger import Spent
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.model.sampling.sampler import Choice, Sampled, Sampler, SamplingRow
from tightwire.model.step import StepPlan, ints
from tightwire.server.config.limits import Limits
from tightwire.server.engine.engine import Engine
from tightwire.server.engine.request import RequestRules
from tightwire.server.ipc.engine_stats import RankCounts
from tightwire.server.ipc.messages import AddRequest

_VOCAB = 512
_PROMPT_LEN = 100
_BATCHES = 5  # the two take turns


class _Device:
    """Runs steps in turn; ``idle_s``: how long it waited for each."""

    def __init__(self, step_s: float) -> None:
        self._step_s, self._end_s = step_s, 0.0
        self.idle_s: list[float] = []

    def execute(self, plan: StepPlan, chosen_R: Tensor | None = None) -> Tensor:
        now_s = time.perf_counter()
        self.idle_s.append(max(0.0, now_s - self._end_s))
        self._end_s = max(now_s, self._end_s) + self._step_s
        return torch.zeros(len(ints(plan.logit_rows)), _VOCAB)

    def broadcast(self, plans: Sequence[StepPlan]) -> None:
        """There are no other ranks."""

    def step_tokens(self) -> None:
        return None

    def comm_spent(self) -> Spent:
        return Spent()

    def counts(self) -> RankCounts:
        return RankCounts()

    def wait_until(self, end_s: float) -> None:
        time.sleep(max(0.0, end_s - time.perf_counter()))

    @property
    def end_s(self) -> float:
        return self._end_s


class _DeviceSampler(Sampler):
    """Its tokens are there when the device has done the step that was launched last."""

    def __init__(self, device: _Device) -> None:
        super().__init__(_VOCAB)
        self._played = device

    def start(self, logits_RV: Tensor, rows: Sequence[SamplingRow], *, waits: bool) -> Choice:
        choice, end_s = super().start(logits_RV, rows, waits=waits), self._played.end_s
        wait = choice.wait

        def when_done() -> Sampled:
            self._played.wait_until(end_s)
            return wait()

        choice.wait = when_done
        return choice


def _idle_us(plan_ahead: bool, num_seqs: int, num_steps: int, step_s: float) -> float:
    """Median over the steps of generated tokens."""
    length = _PROMPT_LEN + num_steps + 1
    device = _Device(step_s)
    engine = Engine(
        runner=device,
        sampler=_DeviceSampler(device),
        limits=Limits(
            max_model_len=length,
            max_num_seqs=num_seqs,
            max_num_batched_tokens=num_seqs * _PROMPT_LEN,
            num_blocks=num_seqs * -(-length // 16) + num_seqs,
            block_size=16,
        ),
        rules=RequestRules(vocab_size=_VOCAB, max_model_len=length),
        plan_ahead=plan_ahead,
    )
    for index in range(num_seqs):
        params = SamplingParams(max_tokens=num_steps, temperature=0.0, ignore_eos=True)
        engine.add(AddRequest(str(index), [index % _VOCAB] * _PROMPT_LEN, params))
    encoder = msgspec.msgpack.Encoder()
    while engine.has_work():
        encoder.encode(engine.step())
    return 1e6 * statistics.median(device.idle_s[2:])


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step-ms", type=float, default=8.0, help="what the device needs for a step (default: 8)")
    parser.add_argument("--sequences", default="1,16,64", help="numbers of sequences, with commas (default: 1,16,64)")
    parser.add_argument("--steps", type=int, default=200, help="steps of generated tokens (default: 200)")
    given = parser.parse_args(argv)
    torch.set_num_threads(1)
    for num_seqs in map(int, given.sequences.split(",")):
        times: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(2 * _BATCHES):
            ahead = turn % 2 == 1
            times[ahead].append(_idle_us(ahead, num_seqs, given.steps // _BATCHES, given.step_ms / 1e3))
        off, on = (statistics.median(times[ahead]) for ahead in (False, True))
        _say(
            f"{num_seqs} sequences, steps of {given.step_ms:g} ms: idle {off:.0f} us a step, planned ahead {on:.0f} us"
        )
    return 0


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
