-- name: close_if_past_deadline
-- Closes the lanes of those of some batches whose deadline has passed, and holds their deferrals.
WITH late AS MATERIALIZED (
  SELECT id FROM penstock.batches
   WHERE id = ANY (%(ids)s::uuid[]) AND deadline <= @now
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE batch_id = ANY (ARRAY(SELECT id FROM late)) AND (open OR NOT ended)
   ORDER BY id
     FOR UPDATE
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = ANY (ARRAY(SELECT id FROM late)) AND NOT held AND EXISTS (SELECT FROM lane)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
UPDATE penstock.lanes SET open = false, ended = true
 WHERE id = ANY (ARRAY(SELECT id FROM lane))
RETURNING id

-- name: finish_if_over
-- Ends those of some batches for which there is nothing left to do, and freezes their figures: completed if every input
-- has its outcome, else cancelled or expired once nothing is in flight any more, nor to be run again. The same statement
-- writes the result files, and a delivery for each webhook that asked for the event.
-- The lanes of a cancelled or expired batch are closed by then, so no lease can appear after this statement's snapshot.
-- Figures are the snapshot's. A rerun requested after it makes `reruns` differ, and the batch is left alone. Rows locked
-- by another transaction are left for the next time: this statement waits for no lock. A batch that grows is not whole, nor is
-- one with an operation that still puts rows back, unless it is to end anyway.
-- IS TRUE, here and below: the id alone finds the batch, whatever the statistics say.
WITH sums AS MATERIALIZED (
  SELECT b.id, b.reruns, b.cancelling_at IS NOT NULL OR b.deadline <= @now AS closing,
         b.validated_at IS NOT NULL AND NOT b.growing
           AND p.completed + p.failed + p.not_found + p.skipped = b.total
           -- Last, and as a value: one probe, for a batch that would end without it.
           AND (b.cancelling_at IS NOT NULL OR b.deadline <= @now
                OR (SELECT true FROM penstock.operations
                     WHERE batch_id = b.id AND (state = 'running') IS TRUE LIMIT 1) IS NULL) AS whole, p.*
    FROM penstock.batches b
   CROSS JOIN LATERAL (
     SELECT coalesce(sum(completed), 0)::int4 AS completed, coalesce(sum(failed), 0)::int4 AS failed,
            coalesce(sum(not_found), 0)::int4 AS not_found, coalesce(sum(skipped), 0)::int4 AS skipped,
            coalesce(sum(retried), 0)::int4 AS retried,
            coalesce(sum(output_bytes), 0)::int8 AS output_bytes, coalesce(sum(error_bytes), 0)::int8 AS error_bytes,
            coalesce(sum(input_tokens), 0)::int8 AS input_tokens, coalesce(sum(cached_tokens), 0)::int8 AS cached_tokens,
            coalesce(sum(output_tokens), 0)::int8 AS output_tokens,
            coalesce(sum(reasoning_tokens), 0)::int8 AS reasoning_tokens
       FROM penstock.progress
      WHERE batch_id = b.id) AS p
   WHERE b.id = ANY (%(ids)s::uuid[])
     AND (b.state IN ('in_progress', 'paused', 'cancelling') AND b.deleted_at IS NULL) IS TRUE
),
over AS MATERIALIZED (
  SELECT s.*
    FROM sums s
   CROSS JOIN LATERAL (
     SELECT b.id
       FROM penstock.batches b
      WHERE b.id = s.id
        AND (b.reruns = s.reruns AND b.state IN ('in_progress', 'paused', 'cancelling') AND b.deleted_at IS NULL) IS TRUE
      LIMIT 1
        FOR UPDATE SKIP LOCKED) AS held
   WHERE s.whole
      OR s.closing
         AND NOT EXISTS (SELECT FROM penstock.lanes WHERE batch_id = s.id AND open)
         AND NOT EXISTS (SELECT FROM penstock.leases WHERE batch_id = s.id)
         -- As a value, not NOT EXISTS, which may be planned as a list of all that there are.
         AND (SELECT true FROM penstock.deferrals WHERE batch_id = s.id AND generation > 0 LIMIT 1) IS NULL
),
ended AS (
  UPDATE penstock.batches b
     -- A rerun that was cancelled is over, and the batch completed when it did before.
     SET completed_at = CASE WHEN o.whole AND b.cancelling_at IS NOT NULL THEN coalesce(b.completed_before, @now)
                             WHEN o.whole THEN @now END,
         cancelling_at = CASE WHEN NOT (o.whole AND b.completed_before IS NOT NULL) THEN b.cancelling_at END,
         cancelled_at = CASE WHEN NOT o.whole AND b.cancelling_at IS NOT NULL
                             THEN @now END,
         expired_at = CASE WHEN NOT o.whole AND b.cancelling_at IS NULL
                           THEN @now END,
         completed = o.completed, failed = o.failed, not_found = o.not_found, skipped = o.skipped,
         retried = o.retried, output_bytes = o.output_bytes, error_bytes = o.error_bytes,
         input_tokens = o.input_tokens, cached_tokens = o.cached_tokens, output_tokens = o.output_tokens,
         reasoning_tokens = o.reasoning_tokens
    FROM over o
   WHERE b.id = o.id AND b.id = ANY (ARRAY(SELECT id FROM over))
  RETURNING b.*
),
frozen AS (
  DELETE FROM penstock.progress WHERE batch_id = ANY (ARRAY(SELECT id FROM ended))
),
-- Kept for a retry of the batch.
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = ANY (ARRAY(SELECT id FROM ended WHERE state <> 'completed')) AND NOT held
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
),
results AS (
  INSERT INTO penstock.files
    (id, owner, filename, state, kind, purpose, batch_id, lines, bytes, created_at, sealed_at, expires_at)
  SELECT r.id, e.owner, 'batch_' || replace(e.id::text, '-', '') || r.ending, 'ready', r.kind, 'batch_output', e.id,
         r.lines, r.bytes, @now, @now,
         @now + make_interval(secs => e.output_expires_after_s)
    FROM ended e
   CROSS JOIN LATERAL (VALUES
     ('output', e.output_file_id, '_output.jsonl', e.completed, e.output_bytes),
     -- Lines that were never run are told from the inputs: without those there is nothing to tell.
     ('errors', e.error_file_id, '_error.jsonl',
      CASE WHEN e.file_id IS NULL THEN e.failed + e.not_found + e.skipped ELSE e.total - e.completed END, e.error_bytes)
   ) AS r (kind, id, ending, lines, bytes)
   WHERE r.id IS NOT NULL AND r.lines > 0
),
event AS MATERIALIZED (
  SELECT gen_random_uuid() AS id, e.id AS batch_id, e.owner, 'batch.' || e.state AS type
    FROM ended e
   WHERE e.dialect <> 'anthropic'
),
told AS (
  INSERT INTO penstock.webhook_deliveries (event_id, endpoint_id, owner, type, batch_id, event_at, due_at)
  SELECT event.id, w.id, event.owner, event.type, event.batch_id, @now,
         @now
    FROM event
    JOIN penstock.webhook_endpoints w ON w.owner = event.owner AND event.type = ANY (w.event_types)
)
SELECT id, state, total, completed, failed, not_found, skipped, retried,
       extract(epoch FROM @now - created_at)::float8
  FROM ended

-- name: fail_if_validating
-- Ends a batch that cannot run, saying why, unless its validation is decided already.
WITH batch AS (
  UPDATE penstock.batches
     SET failed_at = @now, problems = %(problems)s::jsonb,
         completed = 0, failed = 0, not_found = 0, skipped = 0, retried = 0, output_bytes = 0, error_bytes = 0,
         input_tokens = 0, cached_tokens = 0, output_tokens = 0, reasoning_tokens = 0
   WHERE id = %(id)s AND (state = 'validating' AND deleted_at IS NULL) IS TRUE
  RETURNING id, owner, dialect
),
event AS MATERIALIZED (
  SELECT gen_random_uuid() AS id, id AS batch_id, owner FROM batch WHERE dialect <> 'anthropic'
),
told AS (
  INSERT INTO penstock.webhook_deliveries (event_id, endpoint_id, owner, type, batch_id, event_at, due_at)
  SELECT event.id, w.id, event.owner, 'batch.failed', event.batch_id, @now,
         @now
    FROM event
    JOIN penstock.webhook_endpoints w ON w.owner = event.owner AND 'batch.failed' = ANY (w.event_types)
)
SELECT id FROM batch
