import gc
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.server.fake_engine import FakeEngine, app_for, says, serve
from helpers.server.made_up_schemas import make_schemas
from tiny import make_tiny

from tightwire.bench.cli import main
from tightwire.bench.lab.structured import bench

pytest.importorskip("llguidance")


def _run(
    engine: FakeEngine, folder: Path, capsys: pytest.CaptureFixture[str], *more: str
) -> tuple[int, dict[str, Any]]:
    model = make_tiny(folder / "tiny", seed=1)
    with serve(app_for(engine)) as url:
        arguments = ["--url", url, "--model", str(model), "--schemas", "4", "--rounds", "2"]
        arguments += ["--max-tokens", "20", "--output", str(folder)]
        status = main(["lab", "structured", *arguments, *more])
    return status, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_schemas_are_the_first_of_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Path(bench.__file__).with_name("schemas.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line) for line in lines] == make_schemas(200, seed=25)
    with pytest.raises(SystemExit):
        main(["lab", "structured", "--schemas", "201"])
    assert "--schemas must be at most 200, got 201" in capsys.readouterr().err


@pytest.fixture(autouse=True)
def _one_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "read_schemas", lambda count: [{"enum": ["yes", "no"]}] * count)


def test_one_run_measures_validity_masks_and_both_speeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = FakeEngine(script=says('"yes"'))
    status, result = _run(engine, tmp_path, capsys)
    assert status == 0
    structured, free = result["cells"]
    assert (structured["answers"], structured["valid"], structured["tokens"]) == (4, 1.0, 4 * 6)
    assert (free["answers"], free["tokens"]) == (4, 4 * 6)
    assert structured["tokens_per_s"] > 0 and free["tokens_per_s"] > 0 and structured["forced"] == 0
    assert 0 < structured["mask_p50_us"] <= structured["mask_p99_us"]
    [written] = tmp_path.glob("structured-*.json")
    assert json.loads(written.read_text())["cells"][0]["tokens"] == 24
    warmup, asked = engine.submitted[:2], engine.submitted[2:]
    assert [bool(request.params.grammar) for request in warmup] == [False, True]
    assert [bool(request.params.grammar) for request in asked] == [True, True, False, False] * 2
    assert len({(*request.prompt_token_ids, request.cache_salt) for request in asked}) == 8, "no prompt is cached"


def test_an_answer_that_is_not_valid_ends_with_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, result = _run(FakeEngine(script=says('"perhaps"')), tmp_path, capsys)
    assert status == 1 and "4 answers are invalid; the first, 0: " in result["error"]
    assert result["cells"][0]["valid"] == 0 and len(result["cells"][0]["problems"]) == 4


# anyio leaves the connection that is being opened when its task is cancelled.
@pytest.mark.filterwarnings(
    "ignore:Exception ignored in. <coroutine object connect_tcp:pytest.PytestUnraisableExceptionWarning"
)
def test_a_refused_request_ends_without_a_warning_about_the_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ("--max-tokens", "100000", "--concurrency", "1", "--rounds", "1")
    status, result = _run(FakeEngine(script=says('"yes"')), tmp_path, capsys, *more)
    gc.collect()  # coroutines that nobody awaits warn then, which fails a test
    assert status == 1 and "max_tokens=100000 exceed" in result["error"]
