"""Which tables hold payload and history, and by what key each is to be distributed over nodes."""

from __future__ import annotations

PAYLOAD = {
    "templates": "source_id",
    "file_chunks": "source_id",
    "row_keys": "source_id",
    "outcomes": "lane_id",
    "attempts": "lane_id",
    "reclaims": "lane_id",
    "journal": "batch_id",
    "samples": "batch_id",
    "blob_bytes": "blob_id",
}
