import csv
import json
from pathlib import Path
from typing import Any

import pytest
from helpers.server.fake_openai import FakeServer, running

from tightwire.bench.cli import main

SMALL = ["--input-len", "12", "--output-len", "4", "--num-requests", "6"]


def bench(
    fake: FakeServer, *argv: str, small: list[str] = SMALL, capsys: pytest.CaptureFixture[str]
) -> tuple[int, dict[str, Any], str]:
    """Run ``bench serve`` against ``fake``: exit code, last line, everything before it and stderr."""
    with running(fake):
        status = main(["serve", "--url", fake.url, *small, *argv])
    captured = capsys.readouterr()
    *text, last = captured.out.splitlines()
    return status, json.loads(last), "\n".join([*text, captured.err])


def test_several_concurrencies_in_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(token_s=0.005)

    status, result, text = bench(fake, "--concurrency", "1,3", capsys=capsys)

    assert status == 0
    assert [cell["name"] for cell in result["cells"]] == ["concurrency 1", "concurrency 3"]
    for cell in result["cells"]:
        assert (cell["succeeded"], cell["failed"], cell["generated_tokens"], cell["prompt_tokens"]) == (6, 0, 24, 72)
        assert cell["ttft_s"]["n"] == cell["tpot_s"]["n"] == cell["e2e_s"]["n"] == 6
        assert cell["itl_s"]["n"] == 18
        assert 0 < cell["tpot_s"]["p50"] <= cell["tpot_s"]["p99"] < cell["e2e_s"]["p99"]
    assert fake.peak_in_flight == 3
    assert result["environment"]["git_revision"] is not None
    assert "concurrency 3" in text
    assert "p99 of 6 requests is hardly more than the slowest" in text


def test_no_prompt_is_sent_twice_and_a_seed_repeats_the_run(capsys: pytest.CaptureFixture[str]) -> None:
    first, second, unseeded = FakeServer(), FakeServer(), FakeServer()

    for fake in (first, second):
        bench(fake, "--concurrency", "1", "--warmups", "2", "--seed", "5", capsys=capsys)
    bench(unseeded, "--warmups", "2", capsys=capsys)

    prompts = [body["prompt"] for body in first.bodies]
    assert len(set(prompts)) == len(prompts) == 3 + 2 + 6  # trials for the length, warm-ups, measured
    again = [body["prompt"] for body in second.bodies]
    assert prompts[:3] == again[:3] and not set(prompts[3:]) & set(again[3:]), "no prefix cache helps"
    ends = [[prompt.split()[4:] for prompt in each] for each in (prompts, again)]
    assert ends[0] == ends[1]
    assert not set(prompts) & {body["prompt"] for body in unseeded.bodies}
    assert all(body["ignore_eos"] is True and body["temperature"] == 0 for body in first.bodies)


def test_greedy_and_sampled_requests_have_a_row_each(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer()

    options = ["--temperature", "0,1", "--top-p", "0.9", "--warmups", "0"]
    _, result, text = bench(fake, *options, capsys=capsys)

    assert [cell["name"] for cell in result["cells"]] == [f"concurrency 1, temperature {t}" for t in (0, 1)]
    assert [(body["temperature"], body["top_p"]) for body in fake.bodies[-12:]] == [(0, 0.9)] * 6 + [(1, 0.9)] * 6
    assert "concurrency 1, temperature 1" in text


@pytest.mark.parametrize("tokens_per_word", [1, 2])
def test_prompt_lengths_follow_the_servers_token_count(
    capsys: pytest.CaptureFixture[str], tokens_per_word: int
) -> None:
    fake = FakeServer(tokens_per_word=tokens_per_word, template_tokens=10)

    _, result, _ = bench(fake, "--endpoint", "chat", "--input-len", "100", capsys=capsys)

    assert result["cells"][0]["prompt_tokens"] == 6 * 100
    assert result["workload"]["num_words"] == 90 // tokens_per_word
    assert "messages" in fake.bodies[0]


def test_a_first_trial_beyond_the_context_is_shortened(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(tokens_per_word=5, context=120)

    status, result, _ = bench(fake, "--input-len", "100", capsys=capsys)
    beyond, failed, _ = bench(FakeServer(context=50), "--input-len", "100", capsys=capsys)

    assert (status, result["cells"][0]["prompt_tokens"]) == (0, 6 * 100)
    assert (beyond, "longer than the context of 50" in failed["error"]) == (1, True)


def test_a_request_rate_is_an_open_loop(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(first_token_s=0.5)

    status, result, _ = bench(fake, "--request-rate", "300", capsys=capsys)

    assert status == 0
    assert result["cells"][0]["name"] == "rate 300/s"
    assert fake.peak_in_flight == 6


def test_raw_samples_and_a_page_are_kept(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    argv = ("--output", str(tmp_path), "--label", "a", "--api-key", "k", "--concurrency", "1,2")
    _, result, _ = bench(FakeServer(token_s=0.001), *argv, capsys=capsys)

    json_path, csv_path, page = map(Path, result["files"])
    kept = json.loads(json_path.read_text())
    rows = list(csv.DictReader(csv_path.read_text(encoding="utf-8").splitlines()))
    assert json_path.name.startswith("a-")
    assert kept["schema"] == result["schema"] == "tightwire.bench.serve/2"
    assert len(kept["cells"][0]["raw"]) == 6 and len(rows) == 12
    assert float(rows[3]["ttft_s"]) == kept["cells"][0]["raw"][3]["ttft_s"]
    assert rows[0]["error"] == ""
    text = page.read_text()
    assert "Measured at the client" in text and "concurrency 2: p99 of 6 requests" in text
    assert "Rates" in text
    assert text.count("<tr") == 1 + 2 + 1 + 8


def test_a_field_is_left_out_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(refuses_fields=("ignore_eos", "stream_options"))

    refused, _, text = bench(fake, capsys=capsys)
    status, _, _ = bench(fake, "--no-ignore-eos", "--extra-body", '{"stream_options": null}', capsys=capsys)

    assert (refused, status) == (1, 0) and "a trial request failed: HTTP 422" in text


def test_unknown_counts_are_marked_when_the_server_sends_no_usage(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, result, text = bench(FakeServer(usage=False), "--output", str(tmp_path), capsys=capsys)

    (cell,) = result["cells"]
    assert (cell["prompt_tokens"], cell["cached_tokens"], cell["total_tokens_per_s"]) == (None, None, None)
    assert cell["generated_tokens"] == 24
    assert "sends no usage" in text and "tokens/s in all" not in text
    page = Path(result["files"][2]).read_text()
    assert "sends no usage" in page and ">tok/s<" not in page


def test_shared_prefix_workload(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(tokens_per_word=2)

    argv = ("--workload", "shared-prefix", "--prefix-len", "40", "--prefix-groups", "2", "--num-requests", "12")
    _, result, _ = bench(fake, *argv, capsys=capsys)

    begins = {" ".join(body["prompt"].split()[:20]) for body in fake.bodies[4:]}
    assert len(begins) == 2
    assert len({body["prompt"] for body in fake.bodies}) == len(fake.bodies)
    assert result["cells"][0]["prompt_tokens"] == 12 * (40 + 12)
    assert result["workload"]["tokens_per_word"] == 2


def test_doubtful_figures_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    _, _, text = bench(FakeServer(ends_after=2, cached_tokens=5), capsys=capsys)

    assert "6 of 6 answers ended before their length" in text
    assert "a prefix cache supplied 30 prompt tokens" in text


@pytest.mark.parametrize(
    ("behaviour", "argv", "says"),
    [
        ({}, ["--model", "other"], "has no model 'other'; it has fake-model"),
        ({"api_key": "right"}, ["--api-key", "wrong"], "refuses the API key (bad key)"),
        ({"refuses": (400, "too long for the context")}, [], "a trial request failed: HTTP 400: too long"),
        ({"refuses": (503, "draining"), "refuses_from": 3}, [], "every warm-up request failed; the last: HTTP 503"),
        ({"refuses": (503, "draining"), "refuses_from": 4}, ["--warmups", "1"], "models answered 503: draining"),
        ({"template_tokens": 50}, [], "one word is already 51 prompt tokens here, more than --input-len 12"),
    ],
)
def test_an_unusable_server_is_a_clear_failure(
    behaviour: dict[str, Any], argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, result, text = bench(FakeServer(**behaviour), *argv, capsys=capsys)

    assert status == 1
    assert says in result["error"]
    assert says in text


def test_samples_are_kept_when_the_server_dies(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    fake = FakeServer(refuses=(503, "rank 1 died"), refuses_from=3 + 1 + 5)

    status, result, _ = bench(
        fake, "--num-requests", "40", "--warmups", "1", "--output", str(tmp_path), "--concurrency", "1,2", capsys=capsys
    )

    assert status == 1
    assert "10 requests in a row failed; the last: HTTP 503: rank 1 died" in result["error"]
    assert [(cell["succeeded"], cell["failed"]) for cell in result["cells"]] == [(5, 10)]
    assert len(json.loads(Path(result["files"][0]).read_text())["cells"][0]["raw"]) == 15


def test_a_server_that_dies_near_the_end_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    fake = FakeServer(refuses=(503, "rank 1 died"), refuses_from=3 + 1 + 4)

    status, result, text = bench(fake, "--warmups", "1", capsys=capsys)

    assert status == 1
    assert "stopped early" in result["error"] and "503: rank 1 died" in result["error"] and "stopped early" in text
    assert [(cell["succeeded"], cell["failed"]) for cell in result["cells"]] == [(4, 2)]


def test_no_server_at_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", "http://127.0.0.1:9"]) == 1

    captured = capsys.readouterr()
    assert "no server answers at http://127.0.0.1:9/v1" in captured.err
    assert "tightwire serve" in json.loads(captured.out.splitlines()[-1])["error"]


def test_an_output_that_cannot_be_written_is_found_before_measuring(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    fake = FakeServer()

    status, result, _ = bench(fake, "--output", str(tmp_path / "file"), capsys=capsys)

    assert status == 1
    assert "cannot be written" in result["error"]
    assert fake.bodies == []


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--concurrency", "0"], "must be at least 1, got 0"),
        (["--concurrency", "1.5"], "whole numbers"),
        (["--request-rate", "a"], "numbers with commas between"),
        (["--request-rate", "nan"], "must be above 0, got nan"),
        (["--concurrency", "1,2", "--num-requests", "1,2,3"], "one for each of the 2 loads"),
        (["--concurrency", "1", "--request-rate", "1"], "not allowed with"),
        (["--input-len", "0"], "--input-len: must be at least 1"),
        (["--url", "ftp://a"], "argument --url: it must look like http://127.0.0.1:8000, got 'ftp://a'"),
        (["--extra-body", "[]"], "expected a JSON object"),
        (["--extra-body", '{"n": 2}'], "argument --extra-body: 'n' would be several answers, got {\"n\": 2}"),
        (["--extra-body", '{"best_of": 4}'], "argument --extra-body: 'best_of' is one answer"),
        (["--extra-body", '{"n": 1, "max_tokens": 9}'], "argument --extra-body: 'max_tokens' is --output-len"),
        (["--extra-body", '{"prompt": "a"}'], "argument --extra-body: 'prompt' is made by --workload and --endpoint"),
        (["--temperature", "nan"], "--temperature: must be at least 0"),
        (["--timeout", "0"], "--timeout: must be above 0"),
        (["--workload", "sonnets"], "must be one of random, shared-prefix"),
        (["--prefix-groups", "0"], "--prefix-groups: must be at least 1"),
        (["--prefix-len", "30"], "--prefix-len and --prefix-groups are for --workload shared-prefix"),
    ],
)
def test_bad_options_are_refused(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(["serve", *argv])

    assert exit_.value.code == 2
    assert says in capsys.readouterr().err
