-- Statements on Penstock's own tables. Each step of an import is one transaction, so nothing of it is seen, claimed or
-- settled before it is whole.

-- name: hold_import
-- Keeps two imports from the same step: the second waits, for a while. The source may take its time to sort.
SELECT set_config('lock_timeout', '30s', true), set_config('statement_timeout', '0', true),
       set_config('idle_in_transaction_session_timeout', '0', true),
       pg_advisory_xact_lock(hashtextextended('penstock import', 0))

-- name: read_import
-- What is known of a file or batch that was imported before.
SELECT figures, imported_at, handed_back_at FROM penstock.imports WHERE id = %(id)s

-- name: list_imported_files
-- Files that were imported before.
SELECT id FROM penstock.imports WHERE kind = 'file'

-- name: record_import
-- Notes that a file or batch is here, with what the source said of it.
INSERT INTO penstock.imports (id, kind, figures, imported_at)
VALUES (%(id)s, %(kind)s, %(figures)s::jsonb, now())
ON CONFLICT (id) DO UPDATE SET figures = excluded.figures, imported_at = excluded.imported_at, handed_back_at = NULL

-- name: next_source
-- A source id that no file has.
SELECT nextval(pg_get_serial_sequence('penstock.files', 'source_id'))

-- name: next_lanes
-- Ids of new lanes.
SELECT nextval(pg_get_serial_sequence('penstock.lanes', 'id')) FROM generate_series(1, %(count)s)

-- name: insert_file
-- A file with its lanes, sealed: its templates are there, in the same transaction.
WITH file AS (
  INSERT INTO penstock.files
    (id, source_id, owner, filename, state, kind, purpose, lines, bytes, created_at, sealed_at, expires_at)
  OVERRIDING SYSTEM VALUE
  VALUES (%(id)s, %(source_id)s, %(owner)s, %(filename)s, 'ready', 'input', 'batch', %(lines)s, %(bytes)s,
          %(created_at)s, %(created_at)s, %(expires_at)s)
)
INSERT INTO penstock.file_lanes (source_id, source_lane, route, endpoint, total)
SELECT %(source_id)s, lane.source_lane, lane.route, lane.endpoint, lane.total
  FROM unnest(%(source_lanes)s::int4[], %(routes)s::text[], %(endpoints)s::text[], %(totals)s::int4[])
         AS lane (source_lane, route, endpoint, total)

-- name: find_file
-- A file that batches can run over, and its lines.
SELECT source_id, lines FROM penstock.files
 WHERE id = %(id)s AND (state = 'ready' AND kind = 'input' AND deleted_at IS NULL) IS TRUE

-- name: list_file_lanes
-- The lanes of a file.
SELECT source_lane, route, endpoint, total FROM penstock.file_lanes WHERE source_id = %(source_id)s ORDER BY source_lane

-- name: copy_outcomes
-- Takes packed answers of the old system.
COPY penstock.outcomes (lane_id, ordinal, line, state, custom_id, status_code, attempts, lease_id, finished_at, error_code,
                        error_message, response)
FROM STDIN (FORMAT BINARY)

-- name: copy_attempts
-- Takes packed failures of the old system.
COPY penstock.attempts (lane_id, ordinal, attempt, lease_id, worker_id, ended_at, duration_ms, counted, status_code,
                        error_code, error_message)
FROM STDIN (FORMAT BINARY)

-- name: add_journal
-- Lets followers of the batch read what was answered before, as if it had been settled now.
INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)
SELECT %(batch)s, j.lane_id, j.completed, j.others, now()
  FROM unnest(%(lanes)s::int8[], %(completed)s::int4multirange[], %(others)s::int4multirange[])
         AS j (lane_id, completed, others)

-- name: add_deferrals
-- Requests that are to be run and lie before the cursor of their lane: between answers, or with attempts behind them.
INSERT INTO penstock.deferrals
  (lane_id, batch_id, owner, band, weight, pool, route, limited, ordinals, attempt, reason, deferred_at, due_at)
SELECT d.lane_id, %(batch)s, %(owner)s, 0,
       coalesce((SELECT weight FROM penstock.owners WHERE owner = %(owner)s), 1), d.pool, d.route, false, d.ordinals,
       d.attempt, 'retry', now(), greatest(d.due_at, now())
  FROM unnest(%(lanes)s::int8[], %(pools)s::text[], %(routes)s::text[], %(ordinals)s::int4multirange[],
              %(attempts)s::int4[], %(due)s::timestamptz[]) AS d (lane_id, pool, route, ordinals, attempt, due_at)

-- name: insert_lanes
-- The lanes of a batch with their cursors, and their places in line as `create_batch_if_ready` gives them.
INSERT INTO penstock.lanes
  (id, batch_id, owner, created_at, pool, route, endpoint, source_id, source_lane, next, total, deadline, open, ended,
   weight, nearness, step, tag)
OVERRIDING SYSTEM VALUE
SELECT l.id, %(batch)s, %(owner)s, %(created_at)s, l.pool, l.route, l.endpoint, l.source_id, l.source_lane, l.next,
       l.total, %(deadline)s::timestamptz, %(open)s, %(ended)s, w.weight, n.nearness, s.step,
       penstock.line_end(l.pool, l.route, 0::int2, %(owner)s, n.nearness)
         + sum(s.step) OVER (PARTITION BY l.pool, l.route ORDER BY l.id)
  FROM unnest(%(ids)s::int8[], %(pools)s::text[], %(routes)s::text[], %(endpoints)s::text[], %(sources)s::int8[],
              %(source_lanes)s::int4[], %(nexts)s::int4[], %(totals)s::int4[])
         AS l (id, pool, route, endpoint, source_id, source_lane, next, total)
 CROSS JOIN LATERAL (
   SELECT coalesce(max(weight), 1) AS weight FROM penstock.owners WHERE owner = %(owner)s) AS w
 CROSS JOIN LATERAL (SELECT penstock.nearness(%(deadline)s::timestamptz, now()) AS nearness) AS n
 CROSS JOIN LATERAL (SELECT greatest(least(l.total - l.next, 250), 1) / (w.weight * n.nearness) AS step) AS s

-- name: insert_batch
-- The batch, its figures frozen if it has ended.
INSERT INTO penstock.batches
  (id, owner, file_id, pool, dialect, endpoint, completion_window, window_s, metadata, deadline, total, created_at,
   validated_at, cancelling_at, completed_at, cancelled_at, failed_at, problems, output_file_id, error_file_id,
   completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens, output_tokens,
   reasoning_tokens)
VALUES
  (%(id)s, %(owner)s, %(file_id)s, 'serve', 'openai', %(endpoint)s, %(completion_window)s, %(window_s)s,
   %(metadata)s::jsonb, %(deadline)s, %(total)s, %(created_at)s, %(created_at)s, %(cancelling_at)s, %(completed_at)s,
   %(cancelled_at)s, %(failed_at)s, %(problems)s::jsonb, %(output_file_id)s, %(error_file_id)s, %(f_completed)s,
   %(f_failed)s, %(f_not_found)s, %(f_skipped)s, %(f_retried)s, %(f_output_bytes)s, %(f_error_bytes)s,
   %(f_input_tokens)s, %(f_cached_tokens)s, %(f_output_tokens)s, %(f_reasoning_tokens)s)

-- name: add_progress
-- The figures of a batch that goes on.
INSERT INTO penstock.progress
  (batch_id, completed, failed, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens, output_tokens,
   reasoning_tokens)
VALUES (%(id)s, %(completed)s, %(failed)s, %(skipped)s, %(retried)s, %(output_bytes)s, %(error_bytes)s,
        %(input_tokens)s, %(cached_tokens)s, %(output_tokens)s, %(reasoning_tokens)s)

-- name: insert_results
-- The result files of a batch that has ended, as `finish_if_over` makes them.
INSERT INTO penstock.files
  (id, owner, filename, state, kind, purpose, batch_id, lines, bytes, created_at, sealed_at, expires_at)
SELECT r.id, %(owner)s, 'batch_' || replace(%(batch)s::uuid::text, '-', '') || r.ending, 'ready', r.kind, 'batch_output',
       %(batch)s, r.lines, r.bytes, %(ended_at)s, %(ended_at)s, r.expires_at
  FROM (VALUES
    ('output', %(output_file_id)s::uuid, '_output.jsonl', %(output_lines)s::int4, %(output_bytes)s::int8,
     %(output_expires_at)s::timestamptz),
    ('errors', %(error_file_id)s::uuid, '_error.jsonl', %(error_lines)s::int4, %(error_bytes)s::int8,
     %(error_expires_at)s::timestamptz)) AS r (kind, id, ending, lines, bytes, expires_at)
 WHERE r.id IS NOT NULL AND r.lines > 0

-- name: count_outcomes
-- What the tables hold now for some lanes.
SELECT state::text, count(*) FROM penstock.outcomes WHERE lane_id = ANY (%(lanes)s::int8[]) GROUP BY state

-- name: hold_batch_if_there
-- Locks a batch that was imported before, and says what became of it here.
SELECT state, reruns, deleted_at IS NOT NULL AS deleted FROM penstock.batches WHERE id = %(id)s FOR UPDATE

-- name: hold_lanes
-- Locks the lanes of a batch: from here on nothing of it is claimed.
SELECT id FROM penstock.lanes WHERE batch_id = %(id)s ORDER BY id FOR UPDATE

-- name: has_leases
-- Whether anything of a batch is in flight.
SELECT EXISTS (SELECT FROM penstock.leases WHERE batch_id = %(id)s)

-- name: has_settled_since
-- Whether anything of a batch was settled after its import.
SELECT EXISTS (SELECT FROM penstock.journal WHERE batch_id = %(id)s AND written_at > %(imported_at)s)

-- name: remove_outcomes
-- Deletes the answers of a batch that is imported anew.
DELETE FROM penstock.outcomes WHERE lane_id = ANY (%(lanes)s::int8[])

-- name: remove_attempts
-- Deletes its failures.
DELETE FROM penstock.attempts WHERE lane_id = ANY (%(lanes)s::int8[])

-- name: remove_reclaims
-- Deletes what was taken back of it.
DELETE FROM penstock.reclaims WHERE lane_id = ANY (%(lanes)s::int8[])

-- name: remove_journal
-- Deletes its journal.
DELETE FROM penstock.journal WHERE batch_id = %(id)s

-- name: remove_samples
-- Deletes its samples.
DELETE FROM penstock.samples WHERE batch_id = %(id)s

-- name: remove_batch
-- Deletes the batch itself with everything else of it.
WITH no_head AS (
  DELETE FROM penstock.journal_heads WHERE batch_id = %(id)s
), no_progress AS (
  DELETE FROM penstock.progress WHERE batch_id = %(id)s
), no_deferral AS (
  DELETE FROM penstock.deferrals WHERE batch_id = %(id)s
), no_lane AS (
  DELETE FROM penstock.lanes WHERE batch_id = %(id)s
), no_result AS (
  DELETE FROM penstock.files WHERE batch_id = %(id)s AND kind <> 'input'
)
DELETE FROM penstock.batches WHERE id = %(id)s

-- name: hold_deferrals
-- Keeps what is left of a batch that does not run from being claimed; a retry of the batch releases it.
UPDATE penstock.deferrals SET held = true WHERE batch_id = %(batch)s

-- name: read_templates_in_order
-- The lines of a source in order.
SELECT line, custom_id, body FROM penstock.templates WHERE source_id = %(source_id)s ORDER BY line

-- name: list_lanes
-- The lanes of a batch.
SELECT id, source_id, source_lane, next, total FROM penstock.lanes WHERE batch_id = %(id)s ORDER BY id

-- name: read_outcomes_in_order
-- What some lanes of one batch have recorded, in the order of lines.
SELECT line, lease_id, state::text, custom_id, status_code, attempts, error_code, error_message, response
  FROM penstock.outcomes
 WHERE lane_id = ANY (%(lanes)s::int8[])
 ORDER BY line

-- name: read_counts
-- State, owner, file and figures of a batch.
SELECT b.state, b.file_id, b.owner, b.total, coalesce(b.completed, p.completed, 0), coalesce(b.failed, p.failed, 0),
       coalesce(b.skipped + b.not_found, p.skipped, 0)
  FROM penstock.batches b
  LEFT JOIN LATERAL (
    SELECT sum(completed)::int4 AS completed, sum(failed)::int4 AS failed, sum(skipped + not_found)::int4 AS skipped
      FROM penstock.progress
     WHERE batch_id = b.id AND b.completed IS NULL) AS p ON true
 WHERE b.id = %(id)s AND b.deleted_at IS NULL
