"""The files of the server that a chat request and a decode step walk through, and no call from a lower floor up."""

import asyncio
import contextlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import msgspec
import torch
import zmq
from helpers.server.fake_engine import app_for, client_of
from tiny import make_tiny

import tightwire
from tightwire.comm.group.group import in_process_groups
from tightwire.model.build import RankGroups, RunnerOptions, build_runner
from tightwire.model.layout import make_layout
from tightwire.model.open import formats_of, open_checkpoint
from tightwire.model.sampling.parameters import SamplingParams
from tightwire.server.config.serve import EngineOptions
from tightwire.server.ipc.channels import Inboxes, bind_receiver, connect_sender, make_address
from tightwire.server.ipc.engine_client import Phase
from tightwire.server.ipc.engine_stats import EngineStats
from tightwire.server.ipc.messages import AddRequest, Output, StepResult, ToEngine
from tightwire.server.ipc.zmq_client import ZmqEngineClient
from tightwire.server.plan.rank_setup import RunPlan
from tightwire.server.ranks.rank_loop import Leader
from tightwire.server.ranks.reporter import Reporter

MOST_FILES_OF_A_REQUEST = 18
MOST_FILES_OF_A_STEP = 12

_SOURCE = f"{Path(tightwire.__file__).parent}/"
_FLOORS = ("", "kernels", "comm", "model", "server")  # the first is the package's own files, which all floors use
_CHAT = {"messages": [{"role": "user", "content": "Hi"}], "stream": True}


class Walk:
    """A profile function that notes each file of the package that runs, and each call into a higher floor."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.calls_up: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        callee = _file_of(frame.f_code)
        if event != "call" or callee is None:
            return
        self.files.add(callee)
        caller = frame.f_back
        while caller is not None and _file_of(caller.f_code) is None:
            caller = caller.f_back
        name = None if caller is None else _file_of(caller.f_code)
        if name is not None and _floor(callee) > _floor(name):
            self.calls_up.add(f"{name} -> {callee}:{frame.f_code.co_qualname}")

    def of_server(self) -> set[str]:
        return {name for name in self.files if name.startswith("server/")}


@contextmanager
def walking() -> Iterator[Walk]:
    walk = Walk()
    sys.setprofile(walk)
    try:
        yield walk
    finally:
        sys.setprofile(None)


def _file_of(code: CodeType) -> str | None:
    return code.co_filename.removeprefix(_SOURCE) if code.co_filename.startswith(_SOURCE) else None


def _floor(name: str) -> int:
    return _FLOORS.index(name.rpartition("/")[0].partition("/")[0])


async def _walk_of_http_process() -> Walk:
    """Answer two chats in this process, with rank 0 played by the test; the second one counts."""
    context, inbox, parent, walk = zmq.Context(), make_address("rank0"), make_address("parent"), Walk()
    client = ZmqEngineClient(to_engine=inbox, from_ranks=parent, reporters=(), max_queued_requests=9)
    with bind_receiver(context, inbox) as receiver, connect_sender(context, parent) as sender:
        client.open()
        client.set_phase(Phase.READY)
        async with client_of(app_for(client)) as http:
            for _ in range(2):
                with walking() as walk:
                    answer = asyncio.create_task(http.post("/v1/chat/completions", json=_CHAT))
                    while not receiver.poll(0):
                        await asyncio.sleep(0.001)
                    request = msgspec.msgpack.decode(receiver.recv(), type=ToEngine)
                    assert isinstance(request, AddRequest)
                    for reason in (None, None, "length"):
                        output = Output(id=request.id, token_ids=[97], finish_reason=reason)
                        sender.send(msgspec.msgpack.encode(StepResult(outputs=[output], stats=EngineStats())))
                    assert (await answer).status_code == 200
    client.close()
    context.term()
    return walk


def _walks_of_rank(folder: Path) -> tuple[Walk, Walk]:
    """On a rank with a model: taking a request, and one decode step."""
    checkpoint = open_checkpoint(str(make_tiny(folder / "tiny", dtype="bfloat16")))
    (group,) = in_process_groups(1)
    sizes: dict[str, Any] = {"max_model_len": 64, "num_blocks": 32}
    runner = build_runner(
        checkpoint.config,
        checkpoint.reader(),
        make_layout(checkpoint.config, 1),
        RankGroups(group),
        RunnerOptions(dtype=torch.bfloat16, block_size=16, formats=formats_of(checkpoint, "auto"), **sizes),
    )
    context, inbox, parent = zmq.Context(), make_address("rank0"), make_address("parent")
    plan = RunPlan(device="cpu", dtype="bfloat16", allreduce="auto", transport="none", **sizes)
    request = AddRequest("a", [1, 2, 3], SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True))
    reporter = Reporter(0, parent, make_address("reporter"))
    leader = Leader(runner, checkpoint.config, plan, EngineOptions(), RankGroups(group), Inboxes((inbox,)), reporter)
    with bind_receiver(context, parent), contextlib.closing(leader), connect_sender(context, inbox) as sender:
        engine = leader.make_engine()
        sender.send(msgspec.msgpack.encode(request))
        with walking() as taking:
            assert leader.take_messages(engine)
        for _ in range(3):
            reporter.send(engine.step())
        with walking() as step:
            assert leader.take_messages(engine)
            reporter.send(engine.step())
    reporter.close()
    runner.close()
    context.term()
    return taking, step


async def test_a_request_and_a_step_walk_through_few_files_and_never_up(tmp_path: Path) -> None:
    http = await _walk_of_http_process()
    taking, step = _walks_of_rank(tmp_path)
    request = http.of_server() | taking.of_server()
    assert len(request) <= MOST_FILES_OF_A_REQUEST, sorted(request)
    assert len(step.of_server()) <= MOST_FILES_OF_A_STEP, sorted(step.of_server())
    assert {"server/http/routes/api.py", "server/ranks/rank_loop.py"} <= http.files | taking.files
    assert {"server/engine/engine.py", "model/decoder.py"} <= step.files
    assert not http.calls_up | taking.calls_up | step.calls_up
