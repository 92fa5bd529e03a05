"""Two servers behind vllm-router, started by the example script: both answer, and all processes end together."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from helpers.server.hosts import free_ports
from helpers.server.server_process import START_S, get, wait_until
from tiny import make_tiny

pytestmark = [pytest.mark.slow, pytest.mark.alone]

REPOSITORY = Path(__file__).parents[2]
SCRIPT = REPOSITORY / "deploy" / "routers" / "two-replicas.sh"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_requests_go_to_both_replicas_and_all_end_together(tmp_path: Path) -> None:
    router = os.environ.get("VLLM_ROUTER") or shutil.which("vllm-router")
    if router is None:
        pytest.skip("needs vllm-router: pip install vllm-router, or VLLM_ROUTER=PATH of the program")
    model, port = make_tiny(tmp_path / "tiny", max_position_embeddings=4096), free_ports(4)
    program = tmp_path / "tightwire"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tightwire "$@"\n')
    program.chmod(0o755)
    variables = {"PORT": str(port), "POLICY": "round_robin", "TIGHTWIRE": str(program), "ROUTER": router}
    own = {**os.environ, **variables, "PYTHONPATH": str(REPOSITORY / "src"), "OMP_NUM_THREADS": "1"}
    arguments = [str(model), "--served-model-name", "tiny", "--kv-cache-memory", "64MiB"]
    with (tmp_path / "log").open("w") as log:
        script = subprocess.Popen(["bash", SCRIPT, *arguments], env=own, stdout=log, stderr=log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until(lambda: script.poll() is not None or answers(f"{url}/health"), START_S)
        assert script.poll() is None, (tmp_path / "log").read_text()
        for number in range(6):
            body = {"model": "tiny", "prompt": f"question {number}", "max_tokens": 4, "ignore_eos": True}
            answer = httpx.post(f"{url}/v1/completions", json=body, timeout=60, trust_env=False)
            assert answer.raise_for_status().json()["usage"]["completion_tokens"] == 4
        pages = [get(f"http://127.0.0.1:{port + number}/metrics").text for number in (1, 2)]
        assert ['tightwire_requests_total{outcome="length"} 3.0' in page for page in pages] == [True, True]
        assert all('vllm:num_requests_running{model_name="tiny"} 0.0' in page for page in pages)
    finally:
        script.send_signal(signal.SIGTERM)
        code = script.wait(60)
    assert code == 143
    started_s = time.monotonic()
    wait_until(lambda: not any(answers(f"http://127.0.0.1:{port + number}/health/live") for number in range(3)), 10)
    assert time.monotonic() - started_s < 10
