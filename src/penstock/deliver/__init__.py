"""Deliveries: webhooks about batches and the answers of sessions to sinks, signed, and only to allowed addresses."""
