-- name: read_columns
-- Reads a job's columns: the input's, and the result's in the order in which they were first seen.
SELECT j.job_type, j.columns,
       ARRAY(SELECT name FROM penstock.job_columns WHERE batch_id = j.batch_id ORDER BY id) AS result_columns
  FROM penstock.jobs j
 WHERE j.batch_id = %(batch)s

-- name: find_grid
-- Finds the one lane of a job, if it has rows yet, how many there are, and how many were claimed. OFFSET 0 keeps the order
-- out of the search: all lanes there are have it, too.
SELECT id, source_id, source_lane, total, next, created_at
  FROM (SELECT * FROM penstock.lanes WHERE batch_id = %(batch)s OFFSET 0) AS its
 ORDER BY id
 LIMIT 1

-- name: read_rows
-- Reads the stored rows of some stretches of a job's lane, the first of them that a byte budget allows and at least one.
SELECT ordinal, line, custom_id, body
  FROM (SELECT t.*, sum(octet_length(t.body)) OVER (ORDER BY t.ordinal) - octet_length(t.body) AS before
          FROM unnest(%(starts)b::int4[], %(stops)b::int4[]) AS w (start, stop)
         CROSS JOIN LATERAL (
           SELECT ordinal, line, custom_id, body FROM penstock.templates
            WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= w.start AND ordinal < w.stop
            GROUP BY source_id, source_lane, ordinal) AS t) AS t
 WHERE before < %(bytes)s
 ORDER BY ordinal

-- name: read_row_outcomes
-- Reads the outcomes of the same rows, in the same manner.
SELECT ordinal, state::text, attempts, error_code, error_message, response, finished_at
  FROM (SELECT o.*, sum(o.size) OVER (ORDER BY o.ordinal) - o.size AS before
          FROM unnest(%(starts)b::int4[], %(stops)b::int4[]) AS w (start, stop)
         CROSS JOIN LATERAL (
           SELECT ordinal, state, attempts, error_code, error_message, response, finished_at,
                  coalesce(octet_length(response), 0) AS size
             FROM penstock.outcomes
            WHERE lane_id = %(lane_id)s AND ordinal >= w.start AND ordinal < least(w.stop, %(end)s)
            GROUP BY lane_id, ordinal) AS o) AS o
 WHERE before < %(bytes)s
 ORDER BY ordinal

-- name: read_sheet_rows
-- Reads the stored rows of one stretch of a job's lane as `read_rows` does, column by column and in one row: a row for each
-- would come in pieces of 8 kB, and a client that waits for every one of them spends more time on it than on all the rest.
SELECT array_agg(ordinal ORDER BY ordinal), array_agg(body ORDER BY ordinal)
  FROM (SELECT ordinal, body, sum(octet_length(body)) OVER (ORDER BY ordinal) - octet_length(body) AS before
          FROM penstock.templates
         WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s
           AND ordinal >= %(start)s AND ordinal < %(stop)s) AS t
 WHERE before < %(bytes)s

-- name: read_sheet_outcomes
-- Reads the outcomes of the same rows, in the same manner.
SELECT array_agg(ordinal ORDER BY ordinal), array_agg(state::text ORDER BY ordinal),
       array_agg(attempts ORDER BY ordinal), array_agg(error_message ORDER BY ordinal),
       array_agg(response ORDER BY ordinal)
  FROM (SELECT ordinal, state, attempts, error_message, response,
               sum(coalesce(octet_length(response), 0)) OVER (ORDER BY ordinal)
                 - coalesce(octet_length(response), 0) AS before
          FROM penstock.outcomes
         WHERE lane_id = %(lane_id)s AND ordinal >= %(start)s AND ordinal < %(stop)s) AS o
 WHERE before < %(bytes)s

-- name: list_live
-- Lists what is in flight of a job, and what waits to be tried again, of one stretch of its rows: ranges, with the attempt
-- each is at and the worker that holds it. As many rows as there are leases and deferrals of the job in the stretch.
SELECT (h.ordinals * int4multirange(int4range(%(start)s, %(stop)s)))::text AS ordinals, h.attempt + h.spent AS attempts, h.worker_id, h.claimed_at AS since, h.generation > 0 AS rerun
  FROM penstock.leases h
 WHERE h.batch_id = %(batch)s AND h.ordinals && int4range(%(start)s, %(stop)s)
 UNION ALL
SELECT (d.ordinals * int4multirange(int4range(%(start)s, %(stop)s)))::text, d.attempt + d.spent - 1, NULL, d.deferred_at, d.generation > 0
  FROM penstock.deferrals d
 WHERE d.batch_id = %(batch)s AND d.ordinals && int4range(%(start)s, %(stop)s)

-- name: list_ordinals_of_state
-- Lists the next ordinals of a lane whose outcome has a state. Those that completed are found in the order of the key, the
-- others in an index of their own.
(SELECT ordinal FROM penstock.outcomes
  WHERE lane_id = %(lane_id)s AND ordinal >= %(start)s AND state = 'completed' AND %(state)s = 'completed'
  ORDER BY ordinal
  LIMIT %(rows)s)
UNION ALL
(SELECT ordinal FROM penstock.outcomes
  WHERE lane_id = %(lane_id)s AND ordinal >= %(start)s AND state <> 'completed'
    AND state = %(state)s::penstock.outcome_state AND %(state)s <> 'completed'
  ORDER BY ordinal
  LIMIT %(rows)s)

-- name: find_custom_id
-- Finds the first input of a stretch that has a custom id. There is no index of them: stretches are short.
SELECT ordinal, line FROM penstock.templates
 WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= %(start)s AND ordinal < %(stop)s
   AND custom_id = %(custom_id)s
 ORDER BY ordinal
 LIMIT 1
