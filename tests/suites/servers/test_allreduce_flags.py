"""A server asked for a lossy AllReduce: prompt rows get it, generated rows do not, and /comm and the metrics say so."""

import re
import sys
from pathlib import Path
from typing import Any

from helpers.server import faulty_server
from helpers.server.server_process import ServerProcess, complete, get
from tiny import make_tiny


def test_what_was_asked_for_sums_prompt_rows_and_is_reported(tmp_path: Path) -> None:
    model, name = make_tiny(tmp_path / "tiny"), "hierarchical:int8-g64"
    flags = ["--tp", "2", "--nodes", "2", "--device", "cpu", "--allreduce", name, "--port", "0"]
    with ServerProcess(tmp_path / "temp", str(model), *flags) as server:
        url = server.wait_ready()
        assert complete(url, max_tokens=8).status_code == 200
        comm: dict[str, Any] = get(f"{url}/comm").json()
        metrics = get(f"{url}/metrics").text

    used = {(c["algorithm"], c["phase"]): c for c in comm["counters"] if c["op"] == "all_reduce"}
    num_layers = 2
    assert used[name, "prefill"]["calls"] == 2 * num_layers
    assert used[name, "prefill"]["bytes_sent"] < used[name, "prefill"]["exact_bytes"]
    assert (name, "decode") not in used
    exact = [c for (algorithm, phase), c in used.items() if phase == "decode"]
    assert sum(c["calls"] for c in exact) == 7 * (2 * num_layers + 1)
    assert all(c["bytes_sent"] == c["exact_bytes"] for c in exact)

    by_kind = {(c["site"], c["phase"]): c["algorithm"] for c in comm["choices"] if c["up_to_bytes"] is None}
    assert by_kind["o_proj", "prefill"] == by_kind["down_proj", "prefill"] == name
    assert name not in (by_kind["embed", "prefill"], by_kind["o_proj", "decode"], by_kind["down_proj", "decode"])
    assert all(verdict["ok"] for verdict in comm["self_test"])
    assert re.search(rf'tightwire_comm_selftest_ok{{algorithm="{re.escape(name)}"}} 1.0', metrics)
    assert comm["num_nodes"] == 2
    assert f"allreduce {name} for prefill o_proj, prefill down_proj: --allreduce {name}" in server.log


def test_auto_goes_on_without_an_algorithm_that_sums_wrongly(tmp_path: Path) -> None:
    flags = [str(make_tiny(tmp_path / "tiny")), "--tp", "2", "--device", "cpu", "--port", "0"]
    one_rank_sums_wrongly = (sys.executable, faulty_server.__file__, "sum", "1")
    with ServerProcess(tmp_path / "temp", *flags, command=one_rank_sums_wrongly) as server:
        url = server.wait_ready()
        assert complete(url, max_tokens=4).status_code == 200
        comm: dict[str, Any] = get(f"{url}/comm").json()
        metrics = get(f"{url}/metrics").text
    assert "one-shot" not in {c["algorithm"] for c in [*comm["counters"], *comm["choices"]]}
    assert [v["algorithm"] for v in comm["self_test"] if not v["ok"]] == ["one-shot"]
    assert "replaces one-shot, which failed the self-test" in comm["choices"][0]["reason"]
    assert 'tightwire_comm_selftest_ok{algorithm="one-shot"} 0.0' in metrics
    assert "quarantined one-shot, which failed the self-test: rank 1: " in server.log
