-- name: create_batch_if_ready
-- Creates a batch over a sealed file: the batch and one lane per (url, model), whatever the number of lines.
WITH source AS MATERIALIZED (
  SELECT id, source_id, lines FROM penstock.files
   WHERE id = %(file_id)s AND owner = %(owner)s AND state = 'ready' AND deleted_at IS NULL
     FOR KEY SHARE
),
batch AS (
  INSERT INTO penstock.batches
    (id, owner, file_id, pool, idempotency_key, target, metadata, priority, deadline, total, created_at)
  SELECT %(id)s, %(owner)s, id, %(pool)s, %(key)s, %(target)s, %(metadata)s::jsonb, %(priority)s,
         coalesce(%(deadline)s::timestamptz, 'infinity'), lines, coalesce(%(now)s::timestamptz, now())
    FROM source
  RETURNING id, priority, deadline
)
INSERT INTO penstock.lanes (batch_id, pool, route, endpoint, source_id, source_lane, total, priority, deadline)
SELECT batch.id, %(pool)s, coalesce(%(route)s::text, f.route), f.endpoint, f.source_id, f.source_lane, f.total,
       batch.priority, batch.deadline
  FROM batch, source
  JOIN penstock.file_lanes f ON f.source_id = source.source_id
 ORDER BY f.source_lane
RETURNING id, batch_id, route, total

-- name: find_batch_by_key
-- The batch a key already made, with the file it runs over.
SELECT b.id, b.state, b.total, b.pool, f.id AS file_id, f.digest, b.metadata
  FROM penstock.batches b
  JOIN penstock.files f ON f.id = b.file_id
 WHERE b.owner = %(owner)s AND b.idempotency_key = %(key)s AND b.deleted_at IS NULL

-- name: release_key
-- Frees a batch's key, so that a new batch can be made under it.
UPDATE penstock.batches SET idempotency_key = NULL WHERE id = %(id)s

-- name: read_status
-- A batch's figures in one snapshot: they add up at every read. Ended batches answer from their frozen counts.
SELECT b.id, b.state, b.total, b.created_at, b.target, b.paused_at, b.cancelling_at,
       coalesce(b.completed_at, b.cancelled_at, b.expired_at) AS ended_at,
       coalesce(b.completed, p.completed, 0)::int4 AS completed,
       coalesce(b.failed, p.failed, 0)::int4 AS failed,
       coalesce(b.not_found, p.not_found, 0)::int4 AS not_found,
       coalesce(b.skipped, p.skipped, 0)::int4 AS skipped,
       coalesce(b.retried, p.retried, 0)::int4 AS retried,
       coalesce(l.in_flight, 0)::int4 AS in_flight
  FROM penstock.batches b
  LEFT JOIN LATERAL (
    SELECT sum(completed) AS completed, sum(failed) AS failed, sum(not_found) AS not_found,
           sum(skipped) AS skipped, sum(retried) AS retried
      FROM penstock.progress WHERE batch_id = %(id)s AND b.completed IS NULL) AS p ON true
  LEFT JOIN LATERAL (
    SELECT sum(size) AS in_flight FROM penstock.leases WHERE batch_id = %(id)s) AS l ON true
 WHERE b.id = %(id)s AND b.deleted_at IS NULL

-- name: pause_if_running
-- Closes the lanes and holds the deferrals. What is in flight finishes. Whoever needs several lanes and waits for them
-- takes them in id order: steering here, and settles that make room.
WITH batch AS (
  UPDATE penstock.batches SET paused_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = %(id)s AND state = 'in_progress' AND deleted_at IS NULL
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
closed AS (
  UPDATE penstock.lanes SET open = false WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
)
SELECT id FROM batch

-- name: resume_if_paused
-- Opens the lanes again and releases the deferrals.
WITH batch AS (
  UPDATE penstock.batches SET paused_at = NULL
   WHERE id = %(id)s AND state = 'paused' AND deleted_at IS NULL
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
opened AS (
  UPDATE penstock.lanes SET open = true WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
released AS (
  UPDATE penstock.deferrals SET held = false WHERE batch_id = %(id)s AND held AND EXISTS (SELECT FROM batch)
)
SELECT id FROM batch

-- name: cancel_if_unfinished
-- Stamps the batch and closes its lanes, whatever the number of lines. What is in flight finishes and is kept.
WITH batch AS (
  UPDATE penstock.batches SET cancelling_at = coalesce(%(now)s::timestamptz, now())
   WHERE id = %(id)s AND state IN ('in_progress', 'paused') AND deleted_at IS NULL
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
closed AS (
  UPDATE penstock.lanes SET open = false WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
)
SELECT id FROM batch

-- name: finish_if_settled
-- Ends a batch whose every input has an outcome, and freezes its counts: the deltas they are the sum of can go.
WITH sums AS (
  SELECT coalesce(sum(completed), 0)::int4 AS completed, coalesce(sum(failed), 0)::int4 AS failed,
         coalesce(sum(not_found), 0)::int4 AS not_found, coalesce(sum(skipped), 0)::int4 AS skipped,
         coalesce(sum(retried), 0)::int4 AS retried
    FROM penstock.progress WHERE batch_id = %(id)s
),
batch AS (
  UPDATE penstock.batches b
     SET completed_at = coalesce(%(now)s::timestamptz, now()),
         completed = s.completed, failed = s.failed, not_found = s.not_found, skipped = s.skipped,
         retried = s.retried
    FROM sums s
   WHERE b.id = %(id)s AND b.state IN ('in_progress', 'paused', 'cancelling')
     AND s.completed + s.failed + s.not_found + s.skipped = b.total
  RETURNING b.id
),
frozen AS (
  DELETE FROM penstock.progress WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch)
)
SELECT id FROM batch

-- name: finish_if_drained
-- Ends a cancelled batch, or one past its deadline, once nothing of it is in flight, and freezes its counts.
-- The lanes are closed by then, so no lease can appear after this statement's snapshot.
WITH sums AS (
  SELECT coalesce(sum(completed), 0)::int4 AS completed, coalesce(sum(failed), 0)::int4 AS failed,
         coalesce(sum(not_found), 0)::int4 AS not_found, coalesce(sum(skipped), 0)::int4 AS skipped,
         coalesce(sum(retried), 0)::int4 AS retried
    FROM penstock.progress WHERE batch_id = %(id)s
),
batch AS (
  UPDATE penstock.batches b
     SET cancelled_at = CASE WHEN b.cancelling_at IS NOT NULL THEN coalesce(%(now)s::timestamptz, now()) END,
         expired_at = CASE WHEN b.cancelling_at IS NULL THEN coalesce(%(now)s::timestamptz, now()) END,
         completed = s.completed, failed = s.failed, not_found = s.not_found, skipped = s.skipped,
         retried = s.retried
    FROM sums s
   WHERE b.id = %(id)s
     AND (b.state = 'cancelling' OR b.state IN ('in_progress', 'paused') AND b.deadline <= coalesce(%(now)s::timestamptz, now()))
     AND NOT EXISTS (SELECT FROM penstock.lanes WHERE batch_id = b.id AND open)
     AND NOT EXISTS (SELECT FROM penstock.leases WHERE batch_id = b.id)
     -- Settled since finish_if_settled looked: then it is completed, the next time.
     AND s.completed + s.failed + s.not_found + s.skipped < b.total
  RETURNING b.id
),
dropped AS (
  DELETE FROM penstock.deferrals WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch)
),
frozen AS (
  DELETE FROM penstock.progress WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch)
)
SELECT id FROM batch

-- name: close_if_past_deadline
-- Closes the lanes of a batch whose deadline has passed.
WITH lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE batch_id = %(id)s AND open AND deadline <= coalesce(%(now)s::timestamptz, now())
   ORDER BY id
     FOR UPDATE
)
UPDATE penstock.lanes SET open = false
 WHERE id = ANY (ARRAY(SELECT id FROM lane))
RETURNING id

-- name: hold_strays
-- Holds deferrals that were written while their batch was being paused or cancelled, and releases those that were held
-- while it was being resumed: this very statement may do that, since it waits for nobody and believes its snapshot.
UPDATE penstock.deferrals SET held = NOT held
 WHERE batch_id = %(id)s
   AND held <> (lane_id IN (SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND NOT open))

-- name: list_unfinished
-- Batches that have not ended, for the housekeeping round.
SELECT id FROM penstock.batches
 WHERE completed_at IS NULL AND cancelled_at IS NULL AND expired_at IS NULL AND deleted_at IS NULL
   AND pool = %(pool)s

-- name: fold_progress
-- Sums a batch's deltas into one row. Deltas that a settle or another fold holds are left for the next time.
WITH folded AS (
  DELETE FROM penstock.progress
   WHERE batch_id = %(batch)s
     AND id = ANY (ARRAY(
       SELECT id FROM penstock.progress
        WHERE batch_id = %(batch)s
        ORDER BY id LIMIT %(limit)s
          FOR UPDATE SKIP LOCKED))
  RETURNING completed, failed, not_found, skipped, retried
)
INSERT INTO penstock.progress (batch_id, completed, failed, not_found, skipped, retried)
SELECT %(batch)s, sum(completed), sum(failed), sum(not_found), sum(skipped), sum(retried)
  FROM folded
HAVING count(*) > 0
