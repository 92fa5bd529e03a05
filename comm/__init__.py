"""Communication between ranks: groups, transports, collectives and AllReduce policies. Start with `protocols`.

An algorithm (``all_reduce/``) is written once against the ``Transport`` protocol and so runs over every transport.
"""
