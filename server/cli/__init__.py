"""The verbs of the command line that serve or use a model. Start with `verbs`."""
