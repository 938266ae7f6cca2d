-- name: read_columns
-- Reads a job's columns: the input's, and the result's in the order in which they were first seen.
SELECT j.job_type, j.columns,
       ARRAY(SELECT name FROM penstock.job_columns WHERE batch_id = j.batch_id ORDER BY id) AS result_columns
  FROM penstock.jobs j
 WHERE j.batch_id = %(batch)s

-- name: find_grid
-- Finds the one lane of a job, if it has rows yet, and how many there are.
SELECT id, source_id, source_lane, total FROM penstock.lanes WHERE batch_id = %(batch)s ORDER BY id LIMIT 1

-- name: read_rows
-- Reads the stored rows of a stretch of a job's lane.
SELECT ordinal, line, custom_id, body
  FROM penstock.templates
 WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= %(start)s AND ordinal < %(stop)s
 ORDER BY ordinal

-- name: read_row_outcomes
-- Reads the outcomes of the same stretch.
SELECT ordinal, state::text, attempts, error_code, error_message, response, finished_at
  FROM penstock.outcomes
 WHERE lane_id = %(lane_id)s AND ordinal >= %(start)s AND ordinal < %(stop)s
 ORDER BY ordinal

-- name: list_live
-- Lists what is in flight of a job, and what waits to be tried again: ranges, with the attempt each is at and the worker
-- that holds it. As many rows as there are leases and deferrals of the job.
SELECT h.ordinals::text, h.attempt + h.spent AS attempts, h.worker_id, h.claimed_at AS since
  FROM penstock.leases h
 WHERE h.batch_id = %(batch)s
 UNION ALL
SELECT d.ordinals::text, d.attempt + d.spent - 1, NULL, d.deferred_at
  FROM penstock.deferrals d
 WHERE d.batch_id = %(batch)s
