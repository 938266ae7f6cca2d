"""A fake OpenAI- and Anthropic-compatible upstream whose misbehaviour is chosen, for demos and load tests."""
