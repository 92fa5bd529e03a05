"""What a run is told: YAML in, checked values out. Imports no torch."""
