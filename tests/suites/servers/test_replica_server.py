"""Replicas that share their weights, as a user meets them: a text that is the same from each, counters for each, and a lost rank that ends the server."""

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from helpers.server.server_process import ServerProcess, Streaming, get
from tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.alone]

_ENDLESS = 60_000  # tokens: minutes of work, so that what ends it is the test's doing


def _ask(url: str) -> list[str]:
    body = {"prompt": "one question", "max_tokens": 16, "temperature": 1, "seed": 7, "n": 2, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120, trust_env=False)
    choices = answer.raise_for_status().json()["choices"]
    return [choice["text"] for choice in sorted(choices, key=lambda choice: choice["index"])]


def test_two_replicas_give_one_text_and_a_lost_rank_ends_them(tmp_path: Path) -> None:
    model = make_tiny(tmp_path / "tiny", max_position_embeddings=65_536, num_hidden_layers=4)
    options = ("--dp", "2", "--weights", "partition", "--port", "0", "--kv-cache-memory", "128MiB")
    with ServerProcess(tmp_path / "server", str(model), *options) as server:
        url = server.wait_ready()
        with ThreadPoolExecutor(3) as pool:
            texts = list(pool.map(_ask, [url] * 3))
        assert texts[0][0] != texts[0][1] and texts == [texts[0]] * 3
        streams = [Streaming(url, _ENDLESS), Streaming(url, _ENDLESS)]
        comm = get(f"{url}/comm").json()
        assert (comm["tp"], comm["dp"], comm["transport"]) == (1, 2, "shared-memory")
        assert [replica["num_running"] for replica in comm["replicas"]] == [1, 1]
        assert "4 stream from the 2 replicas of a node, each with a part of every layer" in server.log
        counted = {(counter["op"], counter["phase"]) for counter in comm["counters"]}
        assert "gather_to_root" in {op for op, _ in counted} and ("all_gather", "weights") in counted
        assert 'tightwire_replica_requests_running{replica="1"} 1.0' in get(f"{url}/metrics").text

        os.kill(server.ranks()[1], signal.SIGKILL)

        assert [stream.finish(20)[-1] for stream in streams] == ["data: [DONE]"] * 2
        assert server.wait_exit(20) == 1
        assert "rank 1 (replica 1) (pid " in server.log and "was killed by SIGKILL" in server.log, server.log
