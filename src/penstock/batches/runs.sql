-- name: take_up_run
-- Gives a batch that a run goes on with the key and the target of the command of now, and a deadline if that names one.
-- The deadline of a batch that has ended is set when it is opened again, from the window. Lanes are locked after their
-- batch, by id, as in all steering.
WITH batch AS (
  UPDATE penstock.batches
     SET idempotency_key = coalesce(%(key)s, idempotency_key), target = %(target)s, window_s = coalesce(%(window_s)s, window_s),
         deadline = CASE WHEN completed IS NULL AND %(window_s)s::float8 IS NOT NULL
                         THEN @now + make_interval(secs => %(window_s)s) ELSE deadline END
   WHERE id = %(id)s AND (deleted_at IS NULL) IS TRUE
  RETURNING id, deadline, completed IS NULL AND %(window_s)s::float8 IS NOT NULL AS moved
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE batch_id = (SELECT id FROM batch WHERE moved)
   ORDER BY id
     FOR UPDATE
)
UPDATE penstock.lanes
   SET deadline = (SELECT deadline FROM batch), nearness = penstock.nearness((SELECT deadline FROM batch), @now)
 WHERE id = ANY (ARRAY(SELECT id FROM lane))

-- name: list_runs_alike
-- Lists the newest runs that asked the same of another content, with their keys.
SELECT b.id, b.state, b.idempotency_key, b.metadata
  FROM (SELECT id, owner, state, idempotency_key, metadata, deleted_at, created_at FROM penstock.batches
         WHERE metadata @> %(alike)s::jsonb
        OFFSET 0) AS b
 WHERE b.owner = %(owner)s AND b.deleted_at IS NULL AND b.idempotency_key IS NOT NULL
 ORDER BY b.created_at DESC
 LIMIT %(limit)s
