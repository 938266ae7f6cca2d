-- name: hold_batch
-- Locks a batch, before the next statement.
SELECT id FROM penstock.batches WHERE id = %(id)s FOR UPDATE

-- name: pause_if_running
-- Closes the lanes and holds the deferrals. Calls in flight finish. Statements that wait for several lanes take them
-- in id order (steering, and settles that make room), and after these deferrals, in id order too.
WITH batch AS (
  UPDATE penstock.batches
     SET paused_at = @now, steered_at = @now
   WHERE id = %(id)s
     AND (state = 'in_progress' AND deleted_at IS NULL AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
closed AS (
  UPDATE penstock.lanes SET open = false WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
SELECT id FROM batch

-- name: resume_if_paused
-- Opens the lanes again and releases the deferrals. Both go to the end of the line: nothing was due to them meanwhile.
WITH batch AS (
  UPDATE penstock.batches SET paused_at = NULL, steered_at = @now
   WHERE id = %(id)s
     AND (state = 'paused' AND deleted_at IS NULL AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
opened AS (
  UPDATE penstock.lanes SET open = true, tag = penstock.line_end(pool, route, band, owner, nearness) + step
   WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
parked AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
released AS (
  UPDATE penstock.deferrals SET held = false, tag = NULL WHERE id = ANY (ARRAY(SELECT id FROM parked))
)
SELECT id, pg_notify('penstock_work', '') FROM batch

-- name: cancel_if_unfinished
-- Stamps the batch and closes its lanes, whatever the number of lines. Calls in flight finish; their outcomes are kept.
-- Operations on a job end with it.
WITH batch AS (
  UPDATE penstock.batches
     SET cancelling_at = @now, steered_at = @now
   WHERE id = %(id)s
     AND (state IN ('validating', 'in_progress', 'paused') AND deleted_at IS NULL
          AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE
  RETURNING id
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = %(id)s AND EXISTS (SELECT FROM batch) ORDER BY id FOR UPDATE
),
ended AS (
  UPDATE penstock.operations SET state = 'cancelled', worker_id = NULL, ended_at = @now
   WHERE batch_id = (SELECT id FROM batch) AND (state = 'running') IS TRUE
),
closed AS (
  UPDATE penstock.lanes SET open = false, ended = true WHERE id = ANY (ARRAY(SELECT id FROM lane))
),
waiting AS MATERIALIZED (
  SELECT id FROM penstock.deferrals
   WHERE batch_id = %(id)s AND NOT held AND EXISTS (SELECT FROM batch)
   ORDER BY id
     FOR UPDATE
),
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE id = ANY (ARRAY(SELECT id FROM waiting))
)
SELECT id FROM batch
