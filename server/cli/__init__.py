"""The command-line verbs that serve or use a model. Start with `verbs`."""
