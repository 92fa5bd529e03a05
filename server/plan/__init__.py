"""Decides before start-up what runs where. Start with `run_plan`."""
