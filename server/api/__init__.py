"""OpenAI's dialect: schemas, prompts, responses, streams. Start with `schemas`."""
