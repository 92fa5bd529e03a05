"""Messages to another host reach a receiver that knows the same secret, and no other."""

import pytest
import zmq

from tightwire.server.ipc.channels import bind_receiver, connect_sender

_SECRET = b"a secret of all hosts"


@pytest.mark.parametrize(
    ("sender", "receiver", "arrives"),
    [(_SECRET, _SECRET, True), (b"", b"", True), (b"another secret of hosts", _SECRET, False), (b"", _SECRET, False)],
)
def test_a_message_over_tcp_arrives_with_the_same_secret_only(sender: bytes, receiver: bytes, arrives: bool) -> None:
    context = zmq.Context()
    with (
        bind_receiver(context, "tcp://127.0.0.1:*", receiver) as inbox,
        connect_sender(context, inbox.get_string(zmq.LAST_ENDPOINT), sender) as out,
    ):
        out.send(b"plan")
        assert bool(inbox.poll(10_000 if arrives else 500)) == arrives
    context.term()
