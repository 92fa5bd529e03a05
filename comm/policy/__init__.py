"""Which AllReduce sums which message, and why: costs, choice, the rules that come of it, and the objects they name."""
