"""What ``auto`` comes to, and what is refused by name before anything is loaded."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from helpers.model.tiny_gguf import make_tiny_gguf
from tiny import make_tiny, tiny_config

from tightwire.comm.all_reduce.entry import Setting
from tightwire.comm.group.host import num_cores
from tightwire.comm.policy.error_budget import ErrorBudget
from tightwire.comm.policy.rules import FileRule, Policy, PolicyFile, write_policy_file
from tightwire.comm.policy.tune_file import Measured, Point, this_host, tune_path, write_tuned
from tightwire.cuda_devices import CudaDevice
from tightwire.model.checkpoint.config import LlamaConfig
from tightwire.model.checkpoint.errors import ModelError
from tightwire.model.checkpoint.hf_config import config_from_hf
from tightwire.model.weights.formats import WeightFormats
from tightwire.progress import Progress
from tightwire.server.config.flags import make_config
from tightwire.server.config.serve import ServeConfig
from tightwire.server.plan import comm_decision, run_plan, setting

GIB = 1 << 30
MODEL = config_from_hf(tiny_config(dtype="bfloat16"))


def decide(config: ServeConfig, model: LlamaConfig) -> run_plan.Decision:
    return run_plan.decide(config, model, WeightFormats())


def own_policy(decision: run_plan.Decision) -> Policy:
    return decision.plan.policies[0].policy


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[CudaDevice]:
    """Two unlike CUDA devices; a test may take them away."""
    found = [CudaDevice(name=name, total_bytes=24 * GIB, free_bytes=free * GIB) for name, free in (("A", 20), ("B", 8))]
    monkeypatch.setattr(setting, "cuda_devices", lambda: (found, ""))
    return found


def test_without_a_device_it_runs_on_the_cpu_in_bfloat16(gpus: list[CudaDevice]) -> None:
    gpus.clear()
    plan = decide(make_config({}), replace(MODEL, dtype="float32")).plan
    assert (plan.device, plan.dtype, plan.allreduce, plan.max_model_len) == ("cpu", "bfloat16", "auto", 512)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_with_devices_it_runs_there_in_the_checkpoints_own_numbers(gpus: list[CudaDevice], dtype: str) -> None:
    decision = decide(make_config({"tp": 2}), replace(MODEL, dtype=dtype))
    assert (decision.plan.device, decision.plan.dtype) == ("cuda", dtype)
    assert [pool.name for pool in decision.budget.pools] == ["cuda:0 (A)", "cuda:1 (B)"]


def test_what_was_asked_for_is_what_runs(gpus: list[CudaDevice]) -> None:
    options = {"device": "cpu", "dtype": "float32", "allreduce": "two-shot", "max_model_len": 100, "tp": 2}
    plan = decide(make_config(options), MODEL).plan
    assert (plan.device, plan.dtype, plan.allreduce, plan.max_model_len) == ("cpu", "float32", "two-shot", 100)
    assert plan.policies[0].policy.algorithms == ("two-shot",)


def test_a_lossy_name_is_kept_from_generated_rows_and_all_that_was_asked_is_in_one_word(
    gpus: list[CudaDevice],
) -> None:
    options = {
        "device": "cpu",
        "tp": 2,
        "allreduce": "flash-int8",
        "comm_error_budget": ErrorBudget(0.1),
        "allreduce_decode": ErrorBudget(0.001),
    }
    plan = decide(make_config(options), MODEL).plan
    assert plan.allreduce == "flash-int8+decode=0.001+error-budget=0.1"
    assert plan.policies[0].policy.choices("down_proj", 0, "prefill")[0].algorithms == ("flash-int8",)
    assert "flash-int8" not in plan.policies[0].policy.choices("down_proj", 0, "decode")[0].algorithms


def test_a_single_rank_has_no_policy(gpus: list[CudaDevice]) -> None:
    decision = decide(make_config({"device": "cpu"}), MODEL)
    assert own_policy(decision).rules == () and decision.comm is None
    assert "single rank" not in decision.summary()
    named = decide(make_config({"device": "cpu", "allreduce": "flash-int8"}), MODEL)
    assert "a single rank sums nothing: --allreduce flash-int8 has no effect" in named.summary()


def test_the_summary_names_each_choice_with_its_reason(gpus: list[CudaDevice]) -> None:
    options = {"device": "cpu", "tp": 2, "allreduce": "flash-int8"}
    summary = decide(make_config(options), MODEL).summary()
    assert "allreduce flash-int8 for prefill o_proj, prefill down_proj: --allreduce flash-int8" in summary
    assert "for decode o_proj, decode down_proj: decode rows stay exact" in summary
    assert "carried errors" in summary.splitlines()[0]
    alike = decide(make_config({"device": "cpu", "tp": 2}), MODEL).summary().splitlines()
    assert len([line for line in alike if line.startswith("allreduce ")]) == 1


_MIX = PolicyFile(
    made_for={"world_size": 4},
    rules=(
        FileRule(site="o_proj", phase="prefill", algorithm="flash-int4-plain", layers=(1,), reason="KL 0.001"),
        FileRule(site="down_proj", phase="decode", algorithm="flash:int8-g64,int8-g64"),
    ),
)


def test_requests_may_ask_for_what_serve_would_make_of_that_name(gpus: list[CudaDevice], tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    write_policy_file(path, _MIX)
    names = ("ring", "flash-int8", "two-shot", f"policy:{path}")
    options = {"device": "cpu", "tp": 2, "allreduce": "two-shot"}
    decision = decide(make_config({**options, "allreduce_extra": names}), MODEL)
    # The server's own is one of them anyway.
    assert decision.plan.policy_names == ("two-shot", "ring", "flash-int8", f"policy:{path}")
    for named in decision.plan.policies[1:3]:
        own = repr(own_policy(decide(make_config({**options, "allreduce": named.name}), MODEL)))
        assert repr(named.policy) == own.replace("--allreduce ", "--allreduce-extra ")  # the reason names the flag
    by_file = decide(make_config({"device": "cpu", "tp": 2, "allreduce": f"policy:{path}"}), MODEL).plan
    assert by_file.policies == (decision.plan.policies[3],)
    summary = decision.summary()
    assert "on request, ring: allreduce ring: --allreduce-extra ring" in summary
    assert (
        "allreduce flash-int4-plain for prefill o_proj of layer 1: policy file mix.json: KL 0.001; its groups"
        in summary
    )
    assert "for decode down_proj: policy file mix.json: decode rows are quantized" in summary
    assert "warning: the policy file mix.json was made for 4 ranks, not 2" in summary


def test_a_policy_file_for_another_model_is_refused(gpus: list[CudaDevice], tmp_path: Path) -> None:
    path = tmp_path / "mix.json"
    write_policy_file(path, _MIX)
    config = make_config({"device": "cpu", "tp": 2, "allreduce": f"policy:{path}"})
    with pytest.raises(ValueError, match="a rule for layer 1, and the model's layers are 0 to 0"):
        decide(config, replace(MODEL, num_layers=1))


def test_what_was_measured_on_this_host_decides_and_a_damaged_file_is_a_warning(
    gpus: list[CudaDevice], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = make_config({"device": "cpu", "tp": 4, "transport": "process-group"})
    measured = Setting(transport="process-group", device="cpu", world_size=4, num_nodes=1, dtype="float32")
    times = {"one-shot": 9.0, "two-shot": 5.0}
    points = tuple(
        Point(algorithm=name, num_bytes=size, us=us, num_calls=9, wire_bytes=size, relative_error=0.0)
        for name, us in times.items()
        for size in (128, 1 << 20)
    )
    host = this_host([], num_cores())
    path = tune_path(tmp_path / "tightwire", host)
    write_tuned(path, host, [Measured(setting=measured, points=points, computing=(), wrong={}, date="2026-01-01")])

    decision = decide(config, MODEL)
    assert decision.plan.policies[0].policy.choices("o_proj", 0, "decode")[0].algorithms == ("two-shot", "one-shot")
    assert "measured on this host" in decision.summary()

    path.write_text("{")
    decision = decide(config, MODEL)
    assert decision.plan.policies[0].policy.choices("o_proj", 0, "decode")[0].algorithms[0] == "one-shot"
    assert f"warning: {path} is damaged" in decision.summary()


def test_packed_weights_are_counted_as_they_are_and_told(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", "Q4_1")
    num_bytes = {}
    for quantization in ("auto", "none"):
        config = make_config({"model": str(path), "device": "cpu", "quantization": quantization})
        decision = run_plan.prepare(config, Progress(1))[1]
        num_bytes[quantization] = decision.budget.ranks[0].weights
        said = "weight matrices: 16 in " + ("Q4_1" if quantization == "auto" else "bfloat16, expanded from Q4_1")
        assert said in decision.summary().splitlines()
    norms = 2 * 64 * (2 * 2 + 1)
    assert (num_bytes["none"] - norms) * 20 == (num_bytes["auto"] - norms) * 64  # bytes of 32 numbers


@pytest.mark.usefixtures("gpus")
def test_int8_activations_are_for_packed_weights_on_a_cpu(tmp_path: Path) -> None:
    def plan_for(quant: str, **options: str) -> run_plan.Decision:
        path = make_tiny_gguf(tmp_path / f"{quant}.gguf", quant)
        return run_plan.prepare(make_config({"model": str(path), "device": "cpu"} | options), Progress(1))[1]

    for asked, used in (("auto", "float"), ("float", "float"), ("int8", "int8")):
        decision = plan_for("Q4_1", activations=asked)
        assert decision.plan.activations == used
        assert decision.formats.has_int8_activations == (used == "int8")
        assert ("weight matrices: 16 in Q4_1; activations in int8" in decision.summary().splitlines()) == (
            used == "int8"
        )
    with pytest.raises(
        ValueError, match=r"--activations int8 is for packed weights, .* add --quantization int8 or int4"
    ):
        plan_for("F16", activations="int8")
    assert plan_for("F16", activations="int8", quantization="int4").plan.activations == "int8"
    with pytest.raises(ValueError, match="--activations int8 works on a CPU, and the ranks run on CUDA"):
        plan_for("Q4_1", activations="int8", device="cuda")
    noted = [
        any("may cost time" in note for note in plan_for(quant, device=device).notes)
        for quant, device in (("Q4_1", "cuda"), ("Q4_1", "cpu"), ("F16", "cuda"))
    ]
    assert noted == [True, False, False]


def test_a_split_through_a_group_of_packed_weights_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    path = make_tiny_gguf(tmp_path / "m.gguf", "Q8_0")
    options = {"model": str(path), "device": "cpu", "tp": 4}
    with pytest.raises(ValueError, match=r"cannot split model.layers.0.self_attn.o_proj.weight in Q8_0 over 4 ranks"):
        run_plan.prepare(make_config(options), Progress(4))
    run_plan.prepare(make_config({**options, "quantization": "none"}), Progress(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"allreduce": "magic"}, "--allreduce: unknown all-reduce 'magic'; choose one of auto, native"),
        ({"allreduce_extra": ("ring", "magic")}, "--allreduce-extra: unknown all-reduce 'magic'"),
        ({"allreduce_extra": ("policy:/no/such",)}, "--allreduce-extra: the policy file /no/such cannot be read"),
        ({"allreduce": "policy:/no/such"}, "--allreduce: the policy file /no/such cannot be read"),
        ({"allreduce_decode": "flash:int8"}, "--allreduce-decode: 'flash:int8' needs two codecs"),
        ({"allreduce_decode": "flash:int7,int8"}, "--allreduce-decode: .*unknown codec 'int7'"),
    ],
)
def test_a_name_that_no_allreduce_has_is_refused_before_anything_is_fetched(
    options: dict[str, object], message: str
) -> None:
    config = make_config({"model": "no/such/model", "tp": 2, **options})
    with pytest.raises(ValueError, match=message):
        run_plan.prepare(config, Progress(2))


def test_the_split_follows_the_shares(gpus: list[CudaDevice]) -> None:
    decision = decide(make_config({"tp": 2, "tp_split": (3.0, 1.0)}), MODEL)
    first, second = decision.layout.shards
    assert len(first.mlp_columns) > 2 * len(second.mlp_columns)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp": 9}, "cannot split 4 query heads over 9 ranks; use --tp 4 or less"),
        ({"tp": 3}, "--tp 3 needs 3 CUDA devices, one per rank, and 2 are visible; use --tp 2"),
        ({"dtype": "float16"}, "--dtype float16: the checkpoint is in bfloat16"),
        ({"max_model_len": 600}, "exceeds the model's context of 512"),
    ],
)
def test_an_impossible_plan_is_refused(gpus: list[CudaDevice], options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        decide(make_config(options), MODEL)


def test_cuda_without_a_device_is_refused(gpus: list[CudaDevice]) -> None:
    gpus.clear()
    with pytest.raises(ValueError, match="no CUDA device can be used: none is visible"):
        decide(make_config({"device": "cuda"}), MODEL)


def test_cuda_that_does_not_work_says_why(gpus: list[CudaDevice], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "cuda_devices", lambda: (gpus[:1], "B is too old"))
    with pytest.raises(ValueError, match=r"2 CUDA devices, one per rank, and 1 are visible \(B is too old\); use"):
        decide(make_config({"device": "cuda", "tp": 2}), MODEL)
    monkeypatch.setattr(setting, "cuda_devices", lambda: ((), "A is too old"))
    with pytest.raises(ValueError, match="no CUDA device can be used: A is too old; use --device cpu"):
        decide(make_config({"device": "cuda"}), MODEL)
    assert decide(make_config({}), MODEL).plan.device == "cpu"


def test_a_fetch_that_is_no_longer_wanted_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    fractions: list[float] = []

    def fetch(model: str, seed: int, progress: Callable[[float], None]) -> None:
        for step in range(10):
            progress(step / 10)

    class Heard(Progress):
        def stage(self, name: str, fraction: float, rank: int = 0) -> None:
            fractions.append(fraction)

    monkeypatch.setattr(run_plan, "open_checkpoint", fetch)
    with pytest.raises(ModelError, match="stopped while fetching smollm2-135m"):
        run_plan.prepare(make_config({}), Heard(1), stopped=lambda: len(fractions) == 3)
    assert fractions == [0.0, 0.1, 0.2]


@pytest.mark.parametrize(
    ("asked", "shown"), [({"dp": 2}, True), ({"dp": 2, "device": "cpu"}, False), ({"tp": 2}, False)]
)
def test_the_wait_for_copies_of_gpus_is_shown_and_ends(
    asked: dict[str, Any], shown: bool, tmp_path: Path, gpus: list[CudaDevice]
) -> None:
    stages: list[tuple[str, float]] = []

    class Heard(Progress):
        def stage(self, name: str, fraction: float, rank: int = 0) -> None:
            stages.append((name, fraction))

    config = make_config({"model": str(make_tiny(tmp_path / "m")), **asked})
    run_plan.prepare(config, Heard(1))
    timing = [(name, fraction) for name, fraction in stages if "time their copies" in name]
    assert [fraction for _, fraction in timing] == ([0.0, 1.0] if shown else [])


def test_between_gpus_auto_tries_peer_memory_and_has_a_policy_without_it(gpus: list[CudaDevice]) -> None:
    plan = decide(make_config({"tp": 2}), MODEL).plan
    assert plan.transport == "peer-memory" and plan.policies[0].library_policy is not None
    assert plan.peer_blocks == 32
    named = decide(make_config({"tp": 2, "transport": "peer-memory"}), MODEL).plan
    assert named.transport == "peer-memory" and named.policies[0].library_policy is None
    library = decide(make_config({"tp": 2, "transport": "process-group"}), MODEL).plan
    assert library.transport == "process-group" and library.policies[0].library_policy is None


@pytest.mark.parametrize("tp", [1, 2])
def test_peer_memory_is_refused_between_cpu_ranks(gpus: list[CudaDevice], tp: int) -> None:
    with pytest.raises(ValueError, match="--transport peer-memory connects GPUs"):
        decide(make_config({"tp": tp, "device": "cpu", "transport": "peer-memory"}), MODEL)


def test_why_ranks_do_not_share_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(setting, "why_unusable", lambda: "a sandbox forbids it")
    decision = decide(make_config({"tp": 2, "device": "cpu"}), MODEL)
    assert decision.plan.transport == "sockets"
    assert decision.plan.transport_reason == "no shared memory: a sandbox forbids it"
    assert "ranks communicate over sockets: no shared memory: a sandbox forbids it" in decision.summary()
    asked = decide(make_config({"tp": 2, "device": "cpu", "transport": "process-group"}), MODEL)
    assert asked.plan.transport_reason == ""


@pytest.mark.parametrize("asked", ["on", "off"])
def test_planning_ahead_is_told(asked: str) -> None:
    decision = decide(make_config({"tp": 1, "device": "cpu", "plan_ahead": asked}), MODEL)
    assert decision.plan.plan_ahead == (asked == "on")
    assert ("plan-ahead: each step that may not have drafts is launched" in decision.summary()) == (asked == "on")


def test_on_gpus_a_stage_of_a_pipeline_is_one(gpus: list[CudaDevice]) -> None:
    plan = decide(make_config({"tp": 2, "layout": "pipeline", "device": "cuda"}), MODEL).plan
    assert plan.is_pipeline and plan.stages is not None and plan.stages.num_stages == 2 and plan.device == "cuda"
    assert plan.transport == "sockets" and not plan.plan_ahead, "hidden states pass the host's memory"
    assert decide(make_config({"tp": 2, "device": "cuda"}), MODEL).plan.stages is None, "auto"
    with pytest.raises(ValueError, match="--layout hybrid does not combine with --device cuda: keys and values"):
        decide(make_config({"tp": 2, "layout": "hybrid", "device": "cuda"}), MODEL)
    gpus += gpus
    with pytest.raises(
        ValueError, match="does not combine with --stages 2: a stage is one GPU; give --stages 4; leave"
    ):
        decide(make_config({"tp": 4, "stages": 2, "layout": "pipeline", "device": "cuda"}), MODEL)


def test_replicas_have_ranks_and_memory_of_their_own(gpus: list[CudaDevice]) -> None:
    one = decide(make_config({"device": "cpu", "tp": 2, "kv_cache_memory": 64 << 20}), MODEL)
    two = decide(make_config({"device": "cpu", "tp": 2, "dp": 2, "kv_cache_memory": 128 << 20}), MODEL)
    assert (two.plan.num_replicas, two.plan.transport, two.plan.num_blocks) == (2, "shared-memory", one.plan.num_blocks)
    assert own_policy(two) == own_policy(one)  # what sums does not know of other replicas
    first, second = one.budget.ranks
    without_grammars = replace(first, runtime=second.runtime)  # which only the first rank of all chooses by
    assert first.runtime > second.runtime and two.budget.ranks == (first, second, without_grammars, second)
    assert "3 (replica 1)" in two.summary() and "2 replicas of the model on 4 ranks" in two.summary()


def test_replicas_without_anything_to_sum_reach_each_other(gpus: list[CudaDevice]) -> None:
    plan = decide(make_config({"device": "cpu", "dp": 2}), MODEL).plan
    assert (plan.transport, plan.policies[0].policy.rules, plan.policy_names) == ("shared-memory", (), ("auto",))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"tp": 2, "dp": 33}, "--dp must be 1 to 32 with --tp 2, got 33"),
        ({"dp": 0}, "--dp must be 1 to 64 with --tp 1, got 0"),
        ({"tp": 2, "dp": 2, "link": "200mbit"}, "--link must be left out with --dp 2; give --dp 1, got '200mbit'"),
        (
            {"tp": 2, "dp": 3, "nodes": 2},
            r"--nodes must be a divisor of --dp \(3\), because each replica is inside one node",
        ),
        ({"dp": 2, "plan_ahead": "on"}, "--plan-ahead on is not possible with --dp 2"),
    ],
)
def test_what_does_not_go_with_replicas_is_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make_config(options)
    assert make_config({"tp": 2, "dp": 4, "nodes": 2}).parallel.sum_nodes == 1


def test_each_replica_needs_devices_of_its_own(gpus: list[CudaDevice]) -> None:
    gpus.append(CudaDevice(name="C", total_bytes=80 << 30, free_bytes=80 << 30))
    with pytest.raises(ValueError, match="--tp 2 --dp 2 needs 4 CUDA devices, one per rank, and 3 are visible"):
        decide(make_config({"tp": 2, "dp": 2, "device": "cuda"}), MODEL)
    plan = decide(make_config({"dp": 3, "device": "cuda"}), MODEL).plan
    assert (plan.transport, plan.plan_ahead) == ("process-group", False)


def test_each_choice_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()

    def counting(name: str, choose: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            calls[name] += 1
            return choose(*args, **options)

        return call

    names = [name for name in vars(setting) if name.startswith(("choose_", "_choose_", "decide_"))]
    for name in names:
        counted = counting(name, getattr(setting, name))
        for module in (setting, comm_decision, run_plan):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, counted)
    decide(make_config({"tp": 2, "device": "cpu"}), MODEL)
    assert calls == dict.fromkeys(names, 1) and "choose_transport" in names


@pytest.mark.parametrize("offload", [False, True])
def test_on_a_cpu_a_rank_cannot_use_what_another_leaves_of_its_device_memory(offload: bool) -> None:
    given = {"tp": 2, "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 32, "kv_offload": offload}
    budget = decide(make_config(given | {"device_memory": 360 << 20}), MODEL).budget
    first, second = (rank.fixed + budget.cache_bytes(rank) for rank in budget.ranks)
    assert second < first <= 360 << 20  # the first rank also holds what constrains answers
    assert [name for name, _ in budget.needs()] == ["host memory", *(f"--device-memory of rank {r}" for r in (0, 1))]
    least = (first + second) // 2 - (16 << 20)
    with pytest.raises(ValueError, match=r"--device-memory of rank 0: 30\d.*MiB of 2\d\d.*MiB available"):
        decide(make_config(given | {"device_memory": least}), MODEL)


def test_a_limit_of_addresses_limits_each_rank_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_plan, "address_bytes_left", lambda: 400 << 20)
    given = {"tp": 2, "device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 32}
    budget = decide(make_config(given), MODEL).budget
    assert all(rank.fixed + budget.cache_bytes(rank) <= 400 << 20 for rank in budget.ranks)
    assert budget.needs()[1][0] == "`ulimit -v`, beside 4GiB of libraries, of rank 0"
