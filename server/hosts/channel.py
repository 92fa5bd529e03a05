"""The connection between the HTTP processes of two hosts: one JSON message a line, and a deadline for the other's silence."""

import asyncio
import contextlib
import hmac
import secrets
import socket
import time
from collections.abc import Callable

import msgspec

from tightwire.server.hosts.messages import Challenge, End, Hello, Message, Welcome

HELLO_S = 30.0  # for each message of HELLO: on a busy machine a process may still import
_CLOSE_S = 0.5
# After a wait that was longer by more, this process itself was stopped and cannot judge the other host's silence.
_OWN_PAUSE_S = 3.0
LONG_LOST = "; if only long messages are lost, lower the MTU of the interfaces"  # as in a tunnel
_MOST_BYTES = 32 << 20  # of a line: the longest is a plan with a policy for each layer

_ENCODER, _DECODER = msgspec.json.Encoder(), msgspec.json.Decoder(Message)


class LostError(Exception):
    """The other host does not answer; the message says since when, or how the connection ended."""


class Channel:
    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer, self._ended = reader, writer, False
        self.abandon = writer.close  # closes without a word

    def send(self, message: Message) -> None:
        """Queue a message; one to a host that is gone, or after the end, is dropped: the receiver of its messages notices."""
        if not self._ended and not self._writer.is_closing():
            self._writer.write(_ENCODER.encode(message) + b"\n")

    async def receive(self, timeout_s: float, hint: str = "") -> Message:
        """The next message. LostError: none within ``timeout_s`` (the message ends with ``hint``), or the connection ended."""
        began_s = time.monotonic()
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._reader.readline()
        except TimeoutError:
            if time.monotonic() - began_s > timeout_s + _OWN_PAUSE_S:
                return await self.receive(timeout_s, hint)
            raise LostError(f"has been silent for {timeout_s:g} s{hint}") from None
        except (OSError, ValueError) as error:
            raise LostError(f"broke the connection: {error}") from None
        if not line.endswith(b"\n"):
            raise LostError("closed the connection")
        try:
            return _DECODER.decode(line)
        except msgspec.MsgspecError as error:
            raise LostError(f"sent something else than a message of this version: {error}") from None

    async def end(self, code: int, reason: str) -> None:
        self.send(End(code, reason))
        await self.close()

    async def close(self) -> None:
        """Send what is queued, and wait until the other host closes its end too, for at most half a second each.

        If this process closed its socket with unread messages, the kernel would reset the connection, and the last message,
        with the reason of the end, would be lost.
        """
        self._ended = True  # another task may still send beats
        # RuntimeError: another task still reads, so nothing stays unread.
        try:
            with contextlib.suppress(OSError, TimeoutError, RuntimeError):
                async with asyncio.timeout(_CLOSE_S):
                    await self._writer.drain()
                    self._writer.write_eof()
                async with asyncio.timeout(_CLOSE_S):
                    while await self._reader.read(_MOST_BYTES):
                        pass
        finally:
            self._writer.close()


async def open_channel(address: str, port: int, timeout_s: float) -> Channel:
    """Connect to another host. OSError or TimeoutError: not possible now."""
    return Channel(*await asyncio.wait_for(asyncio.open_connection(address, port, limit=_MOST_BYTES), timeout_s))


async def accept_channels(listener: socket.socket, take: Callable[[Channel], None]) -> asyncio.Server:
    """Call ``take`` with each connection to ``listener`` that another host makes."""
    return await asyncio.start_server(lambda *ends: take(Channel(*ends)), sock=listener, limit=_MOST_BYTES)


async def meet(channel: Channel, secret: bytes) -> tuple[Hello, bool]:
    """Node 0's side of HELLO, and whether the node knows the secret. LostError: no HELLO came."""
    nonce = secrets.token_hex(16)
    channel.send(Challenge(nonce))
    hello = await channel.receive(HELLO_S)
    if not isinstance(hello, Hello):
        raise LostError("sent no HELLO")
    proven = hmac.compare_digest(hello.proof.encode(), _prove(secret, hello.node, nonce, hello.nonce))
    if proven:
        channel.send(Welcome(_prove(secret, 0, hello.nonce, nonce).decode()))
    return hello, proven


async def introduce(channel: Channel, hello: Hello, secret: bytes, timeout_s: float) -> None:
    """Say HELLO to node 0. ValueError: it refuses, or does not know the secret. LostError: no answer in ``timeout_s``."""
    challenge = await channel.receive(timeout_s)
    if not isinstance(challenge, Challenge):
        raise LostError("sent no challenge: what listens there is no node 0 of this version")
    nonce = secrets.token_hex(16)
    proof = _prove(secret, hello.node, challenge.nonce, nonce).decode()
    channel.send(msgspec.structs.replace(hello, nonce=nonce, proof=proof))
    answer = await channel.receive(timeout_s, LONG_LOST)
    expected = _prove(secret, 0, nonce, challenge.nonce)
    if not isinstance(answer, Welcome) or not hmac.compare_digest(answer.proof.encode(), expected):
        refusal = answer.reason if isinstance(answer, End) else ""
        raise ValueError(refusal or "node 0 has another shared secret; give every host the same --comm-secret-file")


def _prove(secret: bytes, node: int, first: str, second: str) -> bytes:
    """HMAC-SHA256 of both ends' random numbers, in hex: its sender knows the secret. As bytes, since ``compare_digest`` takes only ASCII text."""
    return hmac.digest(secret, f"node {node} {first} {second}".encode(), "sha256").hex().encode()
