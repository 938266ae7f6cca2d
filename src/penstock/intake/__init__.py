"""Intake: bytes → templates. A file is stored whole or not at all."""

from penstock.intake.ingest import IntakeProgress, StreamIntake, ingest_file
from penstock.intake.jsonl import FileLane
from penstock.intake.refusal import BadLine, IntakeInterrupted, IntakeRefused
from penstock.intake.source import digest_of
from penstock.intake.store import StoredFile
from penstock.intake.sweep import purge_failed, sweep_abandoned, sweep_leftovers

__all__ = [
    "BadLine",
    "FileLane",
    "IntakeInterrupted",
    "IntakeProgress",
    "IntakeRefused",
    "StoredFile",
    "StreamIntake",
    "digest_of",
    "ingest_file",
    "purge_failed",
    "sweep_abandoned",
    "sweep_leftovers",
]
