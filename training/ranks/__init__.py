"""The ranks of a run: who they are, how they meet, and what they tell each other."""
