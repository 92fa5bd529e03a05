"""Communication between ranks: groups, transports, collectives and AllReduce policies. Start with `protocols`."""
