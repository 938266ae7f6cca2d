-- name: list_lanes
-- The lanes of a batch, for merging their outcomes back into input order.
SELECT id, source_id, source_lane, total FROM penstock.lanes WHERE batch_id = %(batch)s ORDER BY id

-- name: list_decided
-- Decided ordinals among the next `rows` of some lanes. The others are the lines a cancelled or expired batch never
-- ran. A stretch, not a number of answers: a million lines that did run must not be searched through in one statement.
-- Asked before the inputs are read: an item decided since then is caught by the reader's last check that the batch has
-- not changed.
-- GROUP BY the key, here and below, keeps each a probe: a join might read the table whole, and a LIMIT for each of many
-- is what a table that is spread over nodes cannot do.
SELECT w.n, o.ordinals::text
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[]) WITH ORDINALITY AS w (lane_id, start, n)
 CROSS JOIN LATERAL (
   SELECT range_agg(int4range(ordinal, ordinal + 1)) AS ordinals FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.start + %(rows)s
    GROUP BY lane_id) AS o

-- name: read_inputs_at
-- Line and custom id of some inputs, without their bodies.
SELECT w.n, t.line, t.custom_id
  FROM unnest(%(sources)b::int8[], %(source_lanes)b::int4[], %(ordinals)b::int4[])
       WITH ORDINALITY AS w (source_id, source_lane, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT line, custom_id FROM penstock.templates
    WHERE source_id = w.source_id AND source_lane = w.source_lane AND ordinal = w.ordinal
    GROUP BY source_id, source_lane, ordinal) AS t
 ORDER BY w.n

-- name: read_ended
-- State of a batch, when it ended, and how many completed and other lines its results have.
SELECT state, coalesce(completed_at, cancelled_at, expired_at) AS ended_at, completed,
       failed + not_found + skipped AS others
  FROM penstock.batches
 WHERE id = %(batch)s AND (deleted_at IS NULL) IS TRUE

-- name: list_lanes_with_inputs
-- The lanes of a batch and whether their inputs can still be read: those of a deleted file cannot, purged or not.
SELECT l.id, l.source_id, l.source_lane, l.total, f.id IS NOT NULL AS readable
  FROM penstock.lanes l
  LEFT JOIN penstock.files f ON f.source_id = l.source_id AND f.deleted_at IS NULL
 WHERE l.batch_id = %(batch)s
 ORDER BY l.id

-- name: read_keys
-- Keys of the outcomes among the next `rows` ordinals of many lanes: enough to put them in order and to fill a page,
-- without their payload.
SELECT w.n, o.ordinal, o.line, o.completed, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[]) WITH ORDINALITY AS w (lane_id, start, n)
 CROSS JOIN LATERAL (
   SELECT ordinal, line, state = 'completed' AS completed, coalesce(octet_length(response), 0) AS size
     FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.start + %(rows)s
    GROUP BY lane_id, ordinal) AS o
 ORDER BY w.n, o.ordinal

-- name: read_keys_not_completed
-- Keys of one lane's next outcomes that did not complete, which have an index of their own. They may be few and far
-- between: `rows` counts outcomes here, not ordinals.
SELECT ordinal, line, coalesce(octet_length(response), 0) AS size
  FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND ordinal >= %(start)s AND state <> 'completed'
 ORDER BY ordinal
 LIMIT %(rows)s

-- name: read_keys_of_state
-- Ordinals of one lane's next outcomes in one state other than completed.
SELECT ordinal
  FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND state = %(state)s::penstock.outcome_state AND state <> 'completed'
   AND ordinal >= %(start)s
 ORDER BY ordinal
 LIMIT %(rows)s

-- name: read_keys_of_group
-- Ordinals of the next outcomes of a lane that failed in one way.
SELECT ordinal FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND fingerprint = %(fingerprint)s::int8 AND ordinal >= %(start)s
 ORDER BY ordinal
 LIMIT %(rows)s

-- name: read_outcomes_in
-- The outcomes of some stretches of lanes.
SELECT w.lane_id, o.ordinal, o.line, o.state::text, o.custom_id, o.status_code, o.request_id, o.error_code,
       o.error_message, o.response
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[], %(stops)b::int4[]) AS w (lane_id, start, stop)
 CROSS JOIN LATERAL (
   SELECT ordinal, line, state, custom_id, status_code, request_id, error_code, error_message, response
     FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY lane_id, ordinal) AS o

-- name: begin_journal
-- Makes the row that counts the numbers given to a batch's lines.
INSERT INTO penstock.journal_heads (batch_id) VALUES (%(batch)s) ON CONFLICT DO NOTHING

-- name: find_unnumbered
-- The first of a batch's journal entries whose lines have no numbers yet. Asked before `read_journal_head`: lines that
-- are numbered in between are counted there.
-- In order, so that it is the first of an index: EXISTS may be answered by reading the table.
SELECT id FROM penstock.journal
 WHERE batch_id = %(batch)s AND outputs_before IS NULL
 ORDER BY xact, id
 LIMIT 1

-- name: read_journal_head
-- Numbers given so far to a batch's output and error lines.
SELECT outputs, errors FROM penstock.journal_heads WHERE batch_id = %(batch)s

-- name: hold_journal_head
-- Locks the count of numbered lines: until the commit no other transaction gives numbers. The statements that follow
-- see all numbers given before.
SELECT outputs, errors FROM penstock.journal_heads WHERE batch_id = %(batch)s FOR UPDATE

-- name: number_journal
-- Numbers the lines of a batch's journal entries that have no numbers yet, after all that have one, `limit` entries at a
-- time. Returns how many lines got a number.
WITH fresh AS MATERIALIZED (
  SELECT f.xact, f.id, f.completed_count, f.others_count,
         %(outputs)s::int8 + sum(f.completed_count) OVER entries - f.completed_count AS outputs_before,
         %(errors)s::int8 + sum(f.others_count) OVER entries - f.others_count AS errors_before
    FROM (SELECT xact, id, completed_count, others_count FROM penstock.journal
           WHERE batch_id = %(batch)s AND outputs_before IS NULL
           ORDER BY xact, id
           LIMIT %(limit)s) AS f
  WINDOW entries AS (ORDER BY f.xact, f.id)
),
numbered AS (
  UPDATE penstock.journal j SET outputs_before = f.outputs_before, errors_before = f.errors_before
    FROM fresh f
   WHERE j.batch_id = %(batch)s AND j.xact = f.xact AND j.id = f.id
)
SELECT coalesce(sum(completed_count), 0)::int8, coalesce(sum(others_count), 0)::int8 FROM fresh

-- name: move_journal_head
-- Notes how many lines have numbers now. The row is held by this transaction.
UPDATE penstock.journal_heads SET outputs = outputs + %(outputs)s, errors = errors + %(errors)s
 WHERE batch_id = %(batch)s

-- name: read_journal_outputs
-- Journal entries with completed lines from a number on, until they hold `lines` of them.
SELECT j.lane_id, j.completed::text, j.outputs_before, j.written_at
  FROM (SELECT lane_id, completed, outputs_before, completed_count, written_at
          FROM penstock.journal
         WHERE batch_id = %(batch)s AND completed_count > 0
           AND outputs_before >= (
             SELECT outputs_before FROM penstock.journal
              WHERE batch_id = %(batch)s AND completed_count > 0 AND outputs_before <= %(offset)s
              ORDER BY outputs_before DESC
              LIMIT 1)
         ORDER BY outputs_before
         LIMIT %(rows)s) AS j
 WHERE j.outputs_before + j.completed_count > %(offset)s AND j.outputs_before < %(offset)s::int8 + %(lines)s
 ORDER BY j.outputs_before

-- name: read_journal_errors
-- Journal entries with lines that did not complete, likewise.
SELECT j.lane_id, j.others::text, j.errors_before, j.written_at
  FROM (SELECT lane_id, others, errors_before, others_count, written_at
          FROM penstock.journal
         WHERE batch_id = %(batch)s AND others_count > 0
           AND errors_before >= (
             SELECT errors_before FROM penstock.journal
              WHERE batch_id = %(batch)s AND others_count > 0 AND errors_before <= %(offset)s
              ORDER BY errors_before DESC
              LIMIT 1)
         ORDER BY errors_before
         LIMIT %(rows)s) AS j
 WHERE j.errors_before + j.others_count > %(offset)s AND j.errors_before < %(offset)s::int8 + %(lines)s
 ORDER BY j.errors_before

-- name: read_keys_written
-- Keys of the outcomes that some journal entries record and that have not been run again since: those that have, have
-- another time. Those that were imported keep the time of the old system, and have no lease.
SELECT w.n, o.ordinal, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[], %(stops)b::int4[], %(times)s::timestamptz[])
       WITH ORDINALITY AS w (lane_id, start, stop, written_at, n)
 CROSS JOIN LATERAL (
   SELECT ordinal, coalesce(octet_length(response), 0) AS size FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.stop
      AND (finished_at = w.written_at OR lease_id = 0) AND (state = 'completed') = %(completed)s
    GROUP BY lane_id, ordinal) AS o
 ORDER BY w.n, o.ordinal

-- name: find_lanes_between
-- Finds the lanes of a batch: the cursor of each, and the ordinals of the lines after one and up to another. Lanes whose file was
-- deleted are left out: the merged view shows inputs.
SELECT l.id, l.source_id, l.source_lane, l.route, l.endpoint, l.next, l.total,
       penstock.ordinal_after_line(l.source_id, l.source_lane, l.total, %(after_line)s) AS start,
       penstock.ordinal_after_line(l.source_id, l.source_lane, l.total, %(last_line)s) AS stop
  FROM penstock.lanes l
  JOIN penstock.files f ON f.source_id = l.source_id AND f.deleted_at IS NULL
 WHERE l.batch_id = %(batch)s
 ORDER BY l.id

-- name: list_undecided
-- Ordinals that a batch has in flight (leases) or waiting to be run again (deferrals) within some stretches of its
-- lanes: of each lease and each deferral all, or the first `ranges` ranges. The stretches of a lane become one value
-- first: they may be many, and so may its leases.
SELECT h.lane_id, h.generation, h.worker_id, h.attempts, h.since,
       ARRAY(SELECT unnest(h.ordinals * w.ordinals) LIMIT %(ranges)s)::text
  FROM (SELECT lane_id, range_agg(int4range(start, stop)) AS ordinals
          FROM unnest(%(lanes)b::int8[], %(starts)b::int4[], %(stops)b::int4[]) AS w (lane_id, start, stop)
         GROUP BY lane_id) AS w
  JOIN (SELECT lane_id, generation, worker_id, attempt + spent AS attempts, claimed_at AS since, ordinals
          FROM penstock.leases WHERE batch_id = %(batch)s
        UNION ALL
        SELECT lane_id, generation, NULL, attempt + spent - 1, deferred_at, ordinals
          FROM penstock.deferrals WHERE batch_id = %(batch)s) AS h
    ON h.lane_id = w.lane_id AND h.ordinals && w.ordinals

-- name: read_input_keys
-- Keys of the inputs in some stretches: enough to choose a page, without their bodies. The outcomes are read after the
-- inputs, and the leases before both: an item that is settled in between is found settled.
SELECT w.n, t.ordinal, t.line, t.size
  FROM unnest(%(sources)b::int8[], %(source_lanes)b::int4[], %(starts)b::int4[], %(stops)b::int4[])
       WITH ORDINALITY AS w (source_id, source_lane, start, stop, n)
 CROSS JOIN LATERAL (
   SELECT ordinal, line, octet_length(body) AS size FROM penstock.templates
    WHERE source_id = w.source_id AND source_lane = w.source_lane AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY source_id, source_lane, ordinal) AS t

-- name: read_outcome_keys
-- Keys of the outcomes in some stretches.
SELECT w.n, o.ordinal, o.state::text, o.generation, o.size
  FROM unnest(%(lanes)b::int8[], %(starts)b::int4[], %(stops)b::int4[])
       WITH ORDINALITY AS w (lane_id, start, stop, n)
 CROSS JOIN LATERAL (
   SELECT ordinal, state, generation, coalesce(octet_length(response), 0) AS size FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal >= w.start AND ordinal < w.stop
    GROUP BY lane_id, ordinal) AS o

-- name: read_bodies_at
-- Inputs with their bodies.
SELECT w.n, t.line, t.custom_id, t.body
  FROM unnest(%(sources)b::int8[], %(source_lanes)b::int4[], %(ordinals)b::int4[])
       WITH ORDINALITY AS w (source_id, source_lane, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT line, custom_id, body FROM penstock.templates
    WHERE source_id = w.source_id AND source_lane = w.source_lane AND ordinal = w.ordinal
    GROUP BY source_id, source_lane, ordinal) AS t
 ORDER BY w.n

-- name: read_results_at
-- Outcomes of some inputs.
SELECT w.n, o.state::text, o.generation, o.status_code, o.request_id, o.error_code, o.error_message, o.response,
       o.attempts, o.finished_at
  FROM unnest(%(lanes)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS w (lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT state, generation, status_code, request_id, error_code, error_message, response, attempts, finished_at
     FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal = w.ordinal
    GROUP BY lane_id, ordinal) AS o

-- name: read_attempts
-- Failed attempts in one lane's stretch, in order, after a position.
SELECT ordinal, id, attempt, worker_id, ended_at, duration_ms, counted, status_code, error_code, error_message,
       not_before
  FROM penstock.attempts
 WHERE lane_id = %(lane)s AND (ordinal, id) > (%(start)s, %(id)s) AND ordinal < %(stop)s
 ORDER BY ordinal, id
 LIMIT %(rows)s

-- name: read_lines_at
-- Line and custom id of some outcomes.
SELECT w.n, o.line, o.custom_id
  FROM unnest(%(lanes)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS w (lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT line, custom_id FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal = w.ordinal
    GROUP BY lane_id, ordinal) AS o
