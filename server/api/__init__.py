"""OpenAI's API: request bodies, prompts, answers, streams, errors, metrics. Start with `answer`."""
