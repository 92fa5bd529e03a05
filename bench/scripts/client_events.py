"""What one streamed event costs the bench's client, in time of its core, and what it would cost through httpx.

    python bench/scripts/client_events.py [--streams 1,32] [--events 200] [--gap-ms 20]

A server in a process of its own sends every stream an event at once, then waits for ``--gap-ms``. What the client computes it
takes from a server on the same cores, and so from what a bench measures there.
"""

import argparse
import asyncio
import multiprocessing
import sys
import time
from collections.abc import Awaitable, Callable
from multiprocessing.connection import Connection

import httpx

from tightwire.bench.client import BenchClient, Prompt
from tightwire.server.cli.remote import Remote, SseDecoder, parse_event

_EVENT = (
    b'data: {"id":"cmpl-0123456789abcdef0123456789abcdef","created":1760000000,"model":"m","system_fingerprint":"fp",'
    b'"choices":[{"index":0,"text":" hello","logprobs":null,"finish_reason":%s}],"object":"text_completion"}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
_PROMPT = Prompt(content="hello", max_tokens=1)


def main() -> int:
    given = _parser().parse_args()
    print_ = sys.stdout.write
    print_("| client | streams | us an event |\n|---|--:|--:|\n")
    for num_streams in given.streams:
        for name, client in (("the bench's (aiohttp)", _bench_client), ("httpx", _httpx)):
            here, there = multiprocessing.Pipe()
            server = multiprocessing.Process(
                target=_serve, args=(there, num_streams, given.events, given.gap_ms / 1e3), daemon=True
            )
            server.start()
            seconds = asyncio.run(_cpu_seconds(client, f"http://127.0.0.1:{here.recv()}/v1", num_streams))
            server.join()
            print_(f"| {name} | {num_streams} | {1e6 * seconds / (num_streams * given.events):.0f} |\n")
    return 0


async def _cpu_seconds(client: Callable[[str, int], Awaitable[None]], base: str, num_streams: int) -> float:
    began = time.process_time()
    await client(base, num_streams)
    return time.process_time() - began


async def _bench_client(base: str, num_streams: int) -> None:
    async with BenchClient(Remote(base=base, model="m"), timeout_s=600, extra_body={}) as client:
        samples = await asyncio.gather(*(client.measure(_PROMPT) for _ in range(num_streams)))
    assert all(sample.error is None for sample in samples), samples[0].error


async def _httpx(base: str, num_streams: int) -> None:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)

    async def read(http: httpx.AsyncClient) -> None:
        decoder = SseDecoder()
        async with http.stream("POST", f"{base}/completions", json={}) as response:
            async for chunk in response.aiter_bytes():
                for data in decoder.feed(chunk):
                    parse_event(data)

    async with httpx.AsyncClient(limits=limits, timeout=600, trust_env=False) as http:
        await asyncio.gather(*(read(http) for _ in range(num_streams)))


def _serve(parent: Connection, num_streams: int, num_events: int, gap_s: float) -> None:
    writers: list[asyncio.StreamWriter] = []
    all_here = asyncio.Event()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(_HEAD)
        writers.append(writer)
        if len(writers) == num_streams:
            all_here.set()

    async def run() -> None:
        server = await asyncio.start_server(handle, "127.0.0.1", 0, backlog=2 * num_streams)
        parent.send(server.sockets[0].getsockname()[1])
        await all_here.wait()
        for number in range(1, num_events + 1):
            await asyncio.sleep(gap_s)
            event = _EVENT % (b'"length"' if number == num_events else b"null")
            for writer in writers:
                writer.write(b"%x\r\n%s\r\n" % (len(event), event))
        for writer in writers:
            writer.write(b"0\r\n\r\n")
            await writer.drain()
            writer.close()

    asyncio.run(run())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=_counts, default=[1, 32], metavar="N,N")
    parser.add_argument("--events", type=int, default=200, metavar="N", help="of each stream (%(default)s)")
    parser.add_argument("--gap-ms", type=float, default=20, metavar="MS", help="between two of a stream (%(default)g)")
    return parser


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


if __name__ == "__main__":
    sys.exit(main())
