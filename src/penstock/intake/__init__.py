"""Intake: bytes → templates. A file is stored whole or not at all."""
