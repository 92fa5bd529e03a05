"""Schedules sequences into steps. Start with `engine`."""
