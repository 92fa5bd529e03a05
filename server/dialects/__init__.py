"""APIs that are another form of a chat: OpenAI's Responses and Anthropic's Messages. Open adapted first."""
