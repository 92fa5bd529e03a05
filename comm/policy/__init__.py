"""Chooses the AllReduce of each message: costs, choice, rules and the objects they name. Start with `choose`."""
