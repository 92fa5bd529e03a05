"""Every command line and option file in deploy/ is one that `tightwire serve` accepts."""

import ast
import importlib
import os
import re
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tightwire.server.config import flags
from tightwire.server.config.serve import ServeConfig

DEPLOY = Path(__file__).parents[2] / "deploy"


def parse(argv: list[str]) -> ServeConfig:
    assert argv[0] == "serve"
    return flags.parse(flags.make_parser("serve", "Serve."), argv[1:])[0]


@pytest.mark.parametrize("service", ["cpu", "cuda"])
def test_compose_starts_servers_with_valid_flags(service: str) -> None:
    command: list[str] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"][service]["command"]
    config = parse([part.replace("${MODEL:-", "").replace("${TP:-", "").rstrip("}") for part in command])
    assert (config.http.host, config.model.model) == ("0.0.0.0", "smollm2-135m")


def test_the_cuda_service_has_room_for_nccl() -> None:
    assert yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]["cuda"]["shm_size"] == "1gb"


def test_slurm_directives_stand_before_the_first_command_and_ask_for_one_task_a_node() -> None:
    lines = (DEPLOY / "slurm" / "tightwire.sbatch").read_text().splitlines()
    first_command = next(number for number, line in enumerate(lines) if line and not line.startswith("#"))
    asked = [line.removeprefix("#SBATCH ") for line in lines[:first_command] if line.startswith("#SBATCH ")]
    assert not any(line.startswith("#SBATCH") for line in lines[first_command:])  # sbatch would ignore it
    options = {name: value for name, _, value in (option.removeprefix("--").partition("=") for option in asked)}
    assert all(option.startswith("--") for option in asked)
    assert (options["nodes"], options["ntasks-per-node"]) == ("2", "1")


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.sh")) + sorted(DEPLOY.rglob("*.sbatch")), ids=str)
def test_shell_scripts_parse(path: Path) -> None:
    checked = subprocess.run(["bash", "-n", path], check=False, capture_output=True, text=True, timeout=20)
    assert checked.returncode == 0, checked.stderr
    assert os.access(path, os.X_OK) or path.suffix == ".sbatch"


def test_what_the_dockerfiles_programs_import_is_there() -> None:
    """Each module, and each name that is taken from one."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    runs = [line for line in text.splitlines() if line.startswith("RUN ")]
    programs = [ast.parse(program) for line in runs for program in re.findall(r"python3? -c '([^']*)'", line)]
    imported = list[str]()
    for program in programs:
        modules = dict[str, ModuleType]()
        for node in ast.walk(program):
            assert not isinstance(node, ast.ImportFrom), "not looked at here"
            if isinstance(node, ast.Import):
                for each in node.names:
                    modules[each.asname or each.name] = importlib.import_module(each.name)
                    imported.append(each.name)
        for node in ast.walk(program):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                getattr(modules[node.value.id], node.attr)
    assert imported == ["importlib.metadata", "tightwire.cuda_devices"]


def test_files_that_compose_mounts_exist() -> None:
    services: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
    mounted = [volume.split(":")[0] for own in services.values() for volume in own.get("volumes", [])]
    files = [path for path in mounted if path.startswith("./")]
    assert len(files) == 5
    assert [path for path in files if not (DEPLOY / path).is_file()] == []
