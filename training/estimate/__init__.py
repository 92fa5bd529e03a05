"""What a run will take, by formulas."""
