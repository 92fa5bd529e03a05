"""Flags and YAML keys are the config's fields, and what is wrong is said by name."""

from pathlib import Path

import pytest

from tightwire.comm.policy.error_budget import ErrorBudget
from tightwire.server.config import flags
from tightwire.server.config.serve import ServeConfig, option_fields

FROZEN = {
    "model": "model served_model_name device dtype quantization activations seed",
    "parallel": "tp dp tp_split layout stages stage_codec allreduce allreduce_decode comm_error_budget "
    "allreduce_extra transport comm_secret_file sum_dtype nodes link link_emulation overlap numa",
    "engine": "max_model_len max_num_seqs max_num_batched_tokens prefix_cache "
    "kv_cache_memory kv_cache_dtype kv_offload cuda_graphs plan_ahead speculation draft_model",
    "weights": "weights stream_from weight_codec stream_layers stream_policy device_memory",
    "http": "host port uds ssl_certfile ssl_keyfile api_key api_key_file chat_template generation_config cors_origin max_queued_requests strict_fields "
    "metrics_alias request_log request_log_prompts otlp_endpoint shutdown_grace_s log_level",
    "timeouts": "comm_timeout_s rank_timeout_s step_timeout_s",
    "hosts": "nnodes node_rank master_addr interface port_range join_timeout_s",
    "adapters": "lora max_loras max_lora_rank lora_dir",
}


def parse(*argv: str) -> ServeConfig:
    return flags.parse(flags.make_parser("serve", "Serve."), argv)[0]


def write(folder: Path, text: str) -> str:
    path = folder / "serve.yaml"
    path.write_text(text)
    return str(path)


def test_without_arguments_every_option_has_its_default() -> None:
    assert parse() == ServeConfig()


@pytest.mark.parametrize(
    ("argv", "group", "name", "value"),
    [
        (["some/folder"], "model", "model", "some/folder"),
        (["--model", "a.gguf"], "model", "model", "a.gguf"),
        (["--served-model-name", "m"], "model", "served_model_name", ("m",)),
        (["x", "--served-model-name", "m", "a,b"], "model", "served_model_name", ("m", "a,b")),
        (["--generation-config", "none"], "http", "generation_config", "none"),
        (["--dtype=float32"], "model", "dtype", "float32"),
        (["--quantization", "int4"], "model", "quantization", "int4"),
        (["--seed", "7"], "model", "seed", 7),
        (["--cors-origin", "http://a:1,https://b"], "http", "cors_origin", ("http://a:1", "https://b")),
        (["--cors-origin", "*"], "http", "cors_origin", ("*",)),
        (["--tp", "2"], "parallel", "tp", 2),
        (["--tp", "2", "--tp-split", "2,1"], "parallel", "tp_split", (2.0, 1.0)),
        (["--allreduce", "two-shot"], "parallel", "allreduce", "two-shot"),
        (["--allreduce", "flash:int4,int8"], "parallel", "allreduce", "flash:int4,int8"),
        (["--allreduce-decode", "ring"], "parallel", "allreduce_decode", "ring"),
        (["--allreduce-decode", "kl=0.02"], "parallel", "allreduce_decode", ErrorBudget(0.02, is_kl=True)),
        (["--allreduce-decode", "0.01"], "parallel", "allreduce_decode", ErrorBudget(0.01)),
        (
            ["--tp", "2", "--allreduce-extra", "ring,flash:int4,int8,policy:a.json"],
            "parallel",
            "allreduce_extra",
            ("ring", "flash:int4,int8", "policy:a.json"),
        ),
        (["--tp", "2", "--allreduce", "policy:a.json"], "parallel", "allreduce", "policy:a.json"),
        (["--comm-error-budget", "0.01"], "parallel", "comm_error_budget", ErrorBudget(0.01)),
        (["--comm-error-budget", "kl=0.02"], "parallel", "comm_error_budget", ErrorBudget(0.02, is_kl=True)),
        (["--tp", "4", "--nodes", "2"], "parallel", "nodes", 2),
        (["--comm-timeout-s", "1.5"], "timeouts", "comm_timeout_s", 1.5),
        (["--kv-cache-memory", "2GiB"], "engine", "kv_cache_memory", 2 << 30),
        (["--port", "0"], "http", "port", 0),
        (["--lora", "a=x", "--lora", "b=y=z"], "adapters", "lora", ("a=x", "b=y=z")),
        (["--lora-dir", "x", "--max-loras", "3"], "adapters", "num_slots", 3),
        (["--lora-dir", "x"], "adapters", "num_slots", 4),
        (["--lora", "a=x,y"], "adapters", "named", [("a", "x,y")]),
    ],
)
def test_a_flag_sets_its_field(argv: list[str], group: str, name: str, value: object) -> None:
    assert getattr(getattr(parse(*argv), group), name) == value


def test_a_step_has_more_tokens_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU 512 rows take less time than the host needs to launch their kernels."""
    assert parse("--device", "cuda").engine.max_num_batched_tokens == 4096
    assert parse("--device", "cuda", "--max-num-batched-tokens", "512").engine.max_num_batched_tokens == 512
    assert parse("--device", "cuda", "--max-num-seqs", "5000").engine.max_num_batched_tokens == 5000
    assert parse("--device", "cpu").engine.max_num_batched_tokens == parse().engine.max_num_batched_tokens == 512
    for name in ("torch_has_cuda", "has_driver"):
        monkeypatch.setattr(f"tightwire.cuda_devices.{name}", lambda: True)
    monkeypatch.setattr("tightwire.cuda_devices.cuda_devices", lambda: (["a GPU"], ""))
    assert parse().engine.max_num_batched_tokens == 4096


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--max-seqs", "3"], "did you mean '--max-num-seqs'"),
        (["model", "second"], "unknown argument 'second'; `tightwire serve --help` lists the flags"),
        (["one", "--model", "two"], "two models given: one and --model two"),
        (["--tp", "two"], "must be a whole number, got 'two'"),
        (["--tp", "0"], "--tp must be 1 to 64, got 0"),
        (["--tp", "10000"], "--tp must be 1 to 64, got 10000"),  # before it becomes 10000 processes
        (["--model", ""], "--model must be a name, a path or random:SHAPE"),
        (["--served-model-name", ""], "--served-model-name: must be names with commas between, got ''"),
        (["x", "--served-model-name", "m", "m"], "--served-model-name must be different names, got m,m"),
        (
            ["--served-model-name", "m", "some/folder"],
            "--served-model-name takes m and some/folder, and no MODEL is left",
        ),
        (["--seed", str(2**63)], "--seed: must be a whole number of at most 64 bits, got"),
        (["--comm-timeout-s", "inf"], "--comm-timeout-s must be above 0 and at most 1e+06, got inf"),
        (["--tp", "2", "--tp-split", "1,2,3"], "--tp-split must be one number for each of the 2 ranks"),
        (["--tp-split", "a,b"], "--tp-split: must be numbers with commas between, got 'a'"),
        (["--tp", "4", "--nodes", "3"], "--nodes must be a divisor of --tp (4), got 3"),
        (["--tp", "2", "--allreduce-extra", "ring,ring"], "--allreduce-extra names ring twice"),
        (["--tp", "2", "--allreduce-extra", "ring,"], "must be names with commas between, got ''"),
        (["--allreduce-extra", "ring"], "--allreduce-extra must be left out with --tp 1"),
        (
            ["--allreduce", "policy:a.json", "--allreduce-decode", "ring"],
            "--allreduce-decode ring and policy:a.json both choose the AllReduce",
        ),
        (
            ["--tp", "2", "--allreduce-extra", "policy:b.json", "--comm-error-budget", "0.1"],
            "--comm-error-budget 0.1 and policy:b.json both choose the AllReduce",
        ),
        (["--allreduce-decode", "kl=x"], "--allreduce-decode: must be a relative error above 0 and below 1, or kl=X"),
        (["--comm-error-budget", "1.5"], "--comm-error-budget: must be a relative error above 0 and below 1"),
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["--port", "70000"], "--port: must be 0 to 65535, got 70000"),
        (["--tp", "2", "--tp-split", "inf,1"], "--tp-split must be finite and above 0"),
        (["--tp-split", "0.5,2"], "--tp-split must be one number for each of the 1 ranks, got 0.5,2.0"),
        (
            ["--tp", "2", "--tp-split", "1e308,1e308"],
            "--tp-split must be finite and above 0, none more than 1000 times",
        ),
        (
            ["--tp", "2", "--tp-split", "1e300,1e-300"],
            "--tp-split must be finite and above 0, none more than 1000 times",
        ),
        (["--device-memory", "9" * 400], "is more than any machine holds; give less than 8388608TiB"),
        (["--host", "ü..ä"], "--host must be an address or the name of a host, got 'ü..ä'"),
        (["--api-key", ""], "--api-key must be left out, or not empty"),
        (["--ssl-certfile", "a.pem"], "--ssl-certfile needs --ssl-keyfile"),
        (["--ssl-keyfile", "a.pem"], "--ssl-keyfile needs --ssl-certfile"),
        (["--uds", ""], "--uds must be a path, or left out"),
        (["--cors-origin", "https://a.example/"], "--cors-origin must be * or SCHEME://HOST[:PORT] without a path"),
        (["--cors-origin", "a.example"], "--cors-origin must be * or"),
        (["--request-log-prompts"], "--request-log-prompts needs --request-log"),
        (["--otlp-endpoint", "collector:4317"], "--otlp-endpoint must be an http:// or https:// address"),
        (["--max-queued-requests", "0"], "--max-queued-requests: must be at least 1"),
        (["--shutdown-grace-s", "-1"], "--shutdown-grace-s: must be 0 to 1e+06"),
        (["--shutdown-grace-s", "inf"], "--shutdown-grace-s: must be 0 to 1e+06"),
        (["--rank-timeout-s", "nan"], "--rank-timeout-s must be above 0"),
        (["--step-timeout-s", "0"], "--step-timeout-s must be above 0"),
        (["--config", "/no/such.yaml"], "/no/such.yaml: No such file or directory"),
    ],
)
def test_a_wrong_flag_ends_with_exit_code_2_and_a_reason(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse(*argv)
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("dash", ["-", "_"])
def test_a_file_fills_what_flags_leave_and_flags_override_it(tmp_path: Path, dash: str) -> None:
    text = f"model: here\ntp: 2\ntp_split: [3, 1]\nmax-num-seqs: 8\nkv{dash}cache{dash}memory: 1GiB\napi_key: 'k'\n"
    config = parse("--config", write(tmp_path, text), "--max-num-seqs", "4")
    assert config.model.model == "here"
    assert config.parallel.tp_split == (3.0, 1.0)
    assert config.engine.max_num_seqs == 4
    assert config.engine.kv_cache_memory == 1 << 30
    assert config.http.api_key == "k"


def test_on_and_off_need_no_quotes_in_a_file(tmp_path: Path) -> None:
    config = parse("--config", write(tmp_path, "overlap: off\nplan_ahead: on\nnuma: off\n"))
    assert (config.parallel.overlap, config.engine.plan_ahead, config.parallel.numa) == ("off", "on", "off")


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    assert parse("--config", write(tmp_path, "# nothing\n")) == ServeConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_seqs: 3", "unknown option 'max_seqs'; did you mean 'max_num_seqs'?"),
        ("engine: {max_num_seqs: 3}", "unknown option 'engine'"),
        ("tp: two", "tp: must be a whole number, got 'two'"),
        ("tp: 1.5", "tp: must be a whole number, got 1.5"),
        ("tp: true", "tp: must be a whole number, got True"),
        ("tp:", "tp: must be a whole number, got None"),
        ("api_key: 123", "api_key: must be text (in quotes), got 123"),
        ("dtype: fp8", "dtype: must be one of auto, float32"),
        ("quantization: q4", "quantization: must be one of auto, none, int8, int4"),
        ("port: 80\nport-: 1", "unknown option 'port-'"),
        ("tp_split: 1\ntp-split: 1", "given twice"),
        ("port: 1\ntp: 2\nport: 2", "'port' is given twice"),
        ("- tp", "must be `name: value` lines"),
        ("a: b: c", "is not YAML"),
        ("served_model_name: 2024-99-01", "serve.yaml is not YAML: month must be in 1..12"),
        pytest.param("tp: " + "[" * 3000, "is not YAML: ", id="deep"),
        ("numa: on", "numa: must be one of auto, off, got True"),
        ("tp: 0", "--tp must be 1 to 64"),
        pytest.param(f"comm_timeout_s: {10**400}", "comm_timeout_s: must be a number, got 1", id="long-number"),
        pytest.param(f"kv_cache_memory: {10**400}", "kv_cache_memory: must be a whole number of", id="long-size"),
        ('uds: "a\\0b"', "--uds must be a path, or left out, got 'a\\x00b'"),
    ],
)
def test_a_wrong_file_ends_with_exit_code_2_and_a_reason(
    tmp_path: Path, text: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit:
        parse("--config", write(tmp_path, text))
    assert exit.value.code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_option_with_its_default(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert exit.value.code == 0
    for name in option_fields():
        assert "--" + name.replace("_", "-") in text
    assert "(default: smollm2-135m)" in text


def test_the_flags_of_serve_are_these() -> None:
    """At most 73 in eight groups, besides --config: who adds one changes this list on purpose."""
    by_group: dict[str, list[str]] = {}
    for name, (group, _) in option_fields().items():
        by_group.setdefault(group, []).append(name)
    assert {group: " ".join(names) for group, names in by_group.items()} == FROZEN
    assert len(option_fields()) <= 73
