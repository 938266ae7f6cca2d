"""Mock upstream, compatible with OpenAI and Anthropic, whose misbehaviour is chosen: for demos and load tests."""
