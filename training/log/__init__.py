"""What a run shows and writes about itself."""
