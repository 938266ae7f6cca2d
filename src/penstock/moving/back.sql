-- Statements of the way back, on Penstock's side. Those on the old system's side are written in its own names (old.py).

-- name: list_live_workers
-- Processes that may be at work on batches.
SELECT pool, host, pid, extract(epoch FROM now() - heartbeat_at)::float8
  FROM penstock.workers
 WHERE heartbeat_at > now() - make_interval(secs => %(grace_s)s) AND (pool = 'serve' OR pool LIKE 'serve:%%')
 ORDER BY heartbeat_at DESC

-- name: list_batches
-- Batches over files of requests, with when each was imported.
SELECT b.id, b.state, i.imported_at, b.reruns
  FROM penstock.batches b
  LEFT JOIN penstock.imports i ON i.id = b.id
 WHERE b.dialect = 'openai' AND b.deleted_at IS NULL AND b.validated_at IS NOT NULL
   AND (%(only)s::uuid[] IS NULL OR b.id = ANY (%(only)s::uuid[]))
 ORDER BY b.created_at, b.id

-- name: read_batch
-- One batch, as the old system has it.
SELECT id, file_id, state, endpoint, completion_window, metadata, owner, created_at,
       nullif(deadline, 'infinity') AS expires_at, cancelling_at, completed_at, failed_at,
       coalesce(cancelled_at, expired_at) AS cancelled_at, output_file_id, error_file_id, total
  FROM penstock.batches WHERE id = %(id)s

-- name: read_file
-- A file, as the old system has it.
SELECT id, source_id, filename, bytes, owner, created_at, expires_at, lines
  FROM penstock.files WHERE id = %(id)s AND deleted_at IS NULL

-- name: read_lines
-- The lines of a file in order, with their lane.
SELECT line, custom_id, source_lane, body FROM penstock.templates WHERE source_id = %(source_id)s ORDER BY line

-- name: list_targets
-- Where the requests of a file go, by lane.
SELECT source_lane, endpoint, route FROM penstock.file_lanes WHERE source_id = %(source_id)s

-- name: read_line_numbers
-- The lines of a file in order, with their lane, without their bodies.
SELECT line, custom_id, source_lane FROM penstock.templates WHERE source_id = %(source_id)s ORDER BY line

-- name: read_outcomes
-- What some lanes have recorded, in the order of lines.
SELECT line, lease_id, state::text, status_code, attempts, finished_at, error_code, error_message, response
  FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[])
 ORDER BY line

-- name: take_leases
-- Takes what is left in flight from workers that are gone. A late result finds no lease and changes nothing.
WITH gone AS (
  DELETE FROM penstock.leases WHERE batch_id = %(id)s RETURNING *
)
INSERT INTO penstock.deferrals
  (lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims, generation, spent,
   reason, deferred_at, due_at, held)
SELECT lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims, generation,
       spent, 'given_back', now(), now(), true
  FROM gone

-- name: mark_handed_back
-- Notes that a batch is the old system's again: the next import takes its word for everything.
INSERT INTO penstock.imports (id, kind, figures, imported_at, handed_back_at)
VALUES (%(id)s, %(kind)s, '{}', now(), now())
ON CONFLICT (id) DO UPDATE SET handed_back_at = now()
