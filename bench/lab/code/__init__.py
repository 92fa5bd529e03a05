"""HumanEval on a running server: its answers are run against each problem's tests. Start at bench."""
