"""Chooses what this process is among the hosts of its server, and lists the options that must be equal on all of them."""

from tightwire import __version__
from tightwire.comm.link.wire import LinkFacts
from tightwire.comm.transport.socket_join import read_secret
from tightwire.kernels.cpu.library import level
from tightwire.option import flag_of
from tightwire.server.config.serve import ServeConfig, option_fields
from tightwire.server.hosts.base import Hosts, Listener
from tightwire.server.hosts.head import Head
from tightwire.server.hosts.member import Member
from tightwire.server.hosts.place import HostPlace
from tightwire.server.hosts.side import Joining

_MAY_DIFFER = {"node_rank", "master_addr", "interface", "join_timeout_s", "comm_secret_file", "stream_from"}
_MAY_DIFFER |= {"model", "draft_model"}  # names of what each host finds by itself


def choose_hosts(
    config: ServeConfig, place: HostPlace | None, ranks: range, link: LinkFacts | None, listener: Listener
) -> Hosts:
    """``Hosts`` if ``place`` is None, else one of several. ``ranks``: those here. ValueError: the secret cannot be read."""
    if place is None:
        return Hosts(ranks, link, listener)
    facts, secret = {"version": __version__, "kernels": level(), **facts_of(config)}, config.parallel.comm_secret_file
    silence_s, join_s = config.timeouts.rank_timeout_s, config.hosts.join_timeout_s
    joining = Joining(place, ranks, facts, listener, silence_s, join_s, read_secret(secret))
    return Head(joining) if place.node == 0 else Member(joining)


def facts_of(config: ServeConfig) -> dict[str, str]:
    """The options that must be equal on all nodes, by flag, as text."""
    return {
        flag_of(name): str(getattr(getattr(config, group), name))
        for name, (group, _) in option_fields().items()
        if group != "http" and name not in _MAY_DIFFER
    }
