-- A deletion locks, in this order: the input file, the batches by id, the job, their leases by id, their lanes by id. A settle
-- locks leases, then lanes; steering locks the batch, then lanes; running again locks the batch, then lanes, then its
-- result files.
-- IS TRUE keeps everything else out of the choice of an index: the id alone finds the row, whatever the statistics say.

-- name: find_file
-- A file that its owner can see, or anybody's when no owner is named. The input of a message batch is hidden from
-- everybody; only expiry asks for hidden files.
SELECT kind, batch_id FROM penstock.files
 WHERE id = %(file_id)s
   AND (state = 'ready' AND deleted_at IS NULL AND (purpose <> 'message_batch' OR %(hidden)s::boolean)
        AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE

-- name: hold_file_if_there
-- Locks a file against new batches and other deletions.
SELECT id FROM penstock.files WHERE id = %(file_id)s AND (state = 'ready' AND deleted_at IS NULL) IS TRUE FOR UPDATE

-- name: find_batch
-- The file to lock for the deletion of a batch. The input of a message batch or of a job belongs to it alone and goes with
-- it; that of another batch goes if that is asked for.
SELECT CASE WHEN dialect IN ('anthropic', 'job') OR %(with_input)s::boolean THEN file_id END FROM penstock.batches
 WHERE id = %(batch_id)s AND (deleted_at IS NULL AND (%(owner)s::text IS NULL OR owner = %(owner)s::text)) IS TRUE

-- name: has_other_batches
-- Whether a file is the input of another batch too.
SELECT EXISTS (SELECT FROM penstock.batches
                WHERE file_id = %(file_id)s AND (id <> %(batch_id)s AND deleted_at IS NULL) IS TRUE)

-- name: hold_batch_if_there
-- Locks a batch, and says whether it has ended.
SELECT completed IS NOT NULL FROM penstock.batches WHERE id = %(batch_id)s AND (deleted_at IS NULL) IS TRUE FOR UPDATE

-- name: hold_job
-- Locks a batch that is a job against new columns of its results: those under way are waited for, later ones see that it
-- was deleted.
SELECT batch_id FROM penstock.jobs WHERE batch_id = %(batch_id)s FOR UPDATE

-- name: cancel_batches_of_file
-- Takes a file away from its batches. Batches that have not ended are being cancelled from now on. Of the problems of
-- batches that could not run, codes and lines stay; their messages may quote the file and go.
WITH mine AS MATERIALIZED (
  SELECT id FROM penstock.batches WHERE file_id = %(file_id)s ORDER BY id FOR UPDATE
)
UPDATE penstock.batches
   SET file_id = NULL,
       cancelling_at = CASE WHEN completed IS NULL THEN coalesce(cancelling_at, @now)
                            ELSE cancelling_at END,
       problems = CASE WHEN problems IS NOT NULL THEN (
         SELECT coalesce(jsonb_agg(jsonb_build_object('code', problem -> 'code', 'line', problem -> 'line',
                                                      'message', 'The input file was deleted.', 'param', NULL)
                                   ORDER BY n), '[]')
           FROM jsonb_array_elements(problems) WITH ORDINALITY AS p (problem, n)) END,
       -- The same command would run the same file again.
       idempotency_key = CASE WHEN dialect <> 'run' AND idempotency_key NOT LIKE 'run:%%' THEN idempotency_key END
 WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING id, completed IS NULL AND deleted_at IS NULL

-- name: hold_leases
-- Locks the leases of these batches: waits for settles under way, and lets none begin.
SELECT id FROM penstock.leases WHERE batch_id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE

-- name: close_lanes
-- From here on nothing of these batches is claimed.
WITH lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE
)
UPDATE penstock.lanes SET open = false, ended = true WHERE id = ANY (ARRAY(SELECT id FROM lane))

-- name: end_leases_if_free
-- Deletes the leases of these batches: that is the fence. A lease that was inserted while `hold_leases` waited may be
-- locked by a settle that waits for a lane closed here, so this waits for none of them.
DELETE FROM penstock.leases
 WHERE id = ANY (ARRAY(
   SELECT id FROM penstock.leases WHERE batch_id = ANY (%(ids)s::uuid[]) ORDER BY id FOR UPDATE SKIP LOCKED))

-- name: has_leases
-- Whether these batches have any leases left.
SELECT EXISTS (SELECT FROM penstock.leases WHERE batch_id = ANY (%(ids)s::uuid[]))

-- name: erase_file_if_held
-- Deletes a file for everybody, and lists the rows to be deleted of it, in stretches that replicas can share out.
-- Lines that a batch never ran cannot be read from the file any more: error files count without them. The history of
-- attempts may quote the requests: it goes too, and so do the deferrals.
WITH file AS (
  UPDATE penstock.files SET deleted_at = @now, idempotency_key = NULL
   WHERE id = %(file_id)s AND deleted_at IS NULL
  RETURNING id, owner, source_id, chunks
),
told AS (
  UPDATE penstock.files f
     SET lines = (SELECT b.failed + b.not_found + b.skipped FROM penstock.batches b WHERE b.id = f.batch_id)
   WHERE f.id = ANY (ARRAY(SELECT error_file_id FROM penstock.batches
                            WHERE id = ANY (%(batches)s::uuid[]) AND completed IS NOT NULL))
),
erasure AS (
  INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)
  SELECT %(erasure_id)s, owner, 'file', id, @now FROM file
),
batch AS MATERIALIZED (
  SELECT id FROM penstock.batches WHERE id = ANY (%(batches)s::uuid[]) AND (deleted_at IS NULL) IS TRUE
),
lane AS MATERIALIZED (
  SELECT id, next FROM penstock.lanes WHERE batch_id = ANY (ARRAY(SELECT id FROM batch)) AND next > 0
)
INSERT INTO penstock.erasure_pieces (erasure_id, what, key, batch_id, source_lane, next, total)
SELECT %(erasure_id)s, 'templates', file.source_id, NULL::uuid, l.source_lane, n, least(n + %(stretch)s, l.total)
  FROM file
  JOIN penstock.file_lanes l ON l.source_id = file.source_id
 CROSS JOIN LATERAL generate_series(0, l.total - 1, %(stretch)s::int4) AS n
UNION ALL
SELECT %(erasure_id)s, 'blobs', file.source_id, NULL, l.source_lane, n, least(n + %(stretch)s, l.total)
  FROM file
  JOIN penstock.file_lanes l ON l.source_id = file.source_id
 CROSS JOIN LATERAL generate_series(0, l.total - 1, %(stretch)s::int4) AS n
 WHERE (SELECT u.ordinal FROM penstock.blob_uses u WHERE u.source_id = file.source_id LIMIT 1) IS NOT NULL
UNION ALL
SELECT %(erasure_id)s, 'chunks', source_id, NULL, NULL, n, least(n + %(stretch)s / 100, chunks)
  FROM file
 CROSS JOIN LATERAL generate_series(0, chunks - 1, %(stretch)s::int4 / 100) AS n
UNION ALL
SELECT %(erasure_id)s, 'attempts', lane.id, NULL, NULL, n, least(n + %(stretch)s, lane.next)
  FROM file, lane
 CROSS JOIN LATERAL generate_series(0, lane.next - 1, %(stretch)s::int4) AS n
UNION ALL
SELECT %(erasure_id)s, 'reclaims', lane.id, NULL, NULL, 0, %(beyond)s FROM file, lane
UNION ALL
SELECT %(erasure_id)s, 'deferrals', NULL, batch.id, NULL, 0, %(beyond)s FROM file, batch

-- name: erase_result_if_held
-- Deletes a batch's output or its errors; the batch drops the file's id. The history of its attempts goes with the
-- errors, or with the output if there are none, unless it went with the input before. The journal goes with the last of
-- the two files.
WITH file AS (
  UPDATE penstock.files SET deleted_at = @now
   WHERE id = %(file_id)s AND deleted_at IS NULL
  RETURNING id, owner, kind, batch_id
),
batch AS (
  UPDATE penstock.batches b
     SET output_file_id = CASE WHEN file.kind = 'output' THEN NULL ELSE b.output_file_id END,
         error_file_id = CASE WHEN file.kind = 'errors' THEN NULL ELSE b.error_file_id END
    FROM file
   WHERE b.id = %(batch_id)s
),
erasure AS (
  INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)
  SELECT %(erasure_id)s, owner, kind, id, @now FROM file
),
rest AS MATERIALIZED (
  SELECT NOT other.there AS last, b.file_id IS NOT NULL AND (file.kind = 'errors' OR NOT other.there) AS history
    FROM file
    JOIN penstock.batches b ON b.id = %(batch_id)s
   CROSS JOIN LATERAL (
     SELECT EXISTS (SELECT FROM penstock.files o
                     WHERE o.batch_id = %(batch_id)s AND o.id <> file.id AND o.deleted_at IS NULL) AS there) AS other
),
lane AS MATERIALIZED (
  SELECT id, next FROM penstock.lanes WHERE batch_id = %(batch_id)s AND next > 0
)
INSERT INTO penstock.erasure_pieces (erasure_id, what, key, batch_id, next, total)
SELECT %(erasure_id)s, part.what, lane.id, NULL::uuid, n, least(n + %(stretch)s, lane.next)
  FROM (SELECT CASE kind WHEN 'output' THEN 'completed' ELSE 'not_completed' END FROM file
        UNION ALL
        SELECT 'attempts' FROM rest WHERE history) AS part (what), lane
 CROSS JOIN LATERAL generate_series(0, lane.next - 1, %(stretch)s::int4) AS n
UNION ALL
SELECT %(erasure_id)s, 'reclaims', lane.id, NULL, 0, %(beyond)s FROM rest, lane WHERE rest.history
UNION ALL
SELECT %(erasure_id)s, 'journal', NULL, %(batch_id)s, 0, %(beyond)s FROM rest WHERE rest.last

-- name: erase_batch_if_held
-- Deletes a batch for everybody, with its result files, and lists the rows to be deleted of it. An archived batch can
-- still be read. Everything that goes with it, its input included, is one erasure.
WITH batch AS (
  UPDATE penstock.batches
     SET deleted_at = CASE WHEN NOT %(archived)s::boolean THEN @now END,
         archived_at = CASE WHEN %(archived)s::boolean THEN @now ELSE archived_at END,
         idempotency_key = NULL
   WHERE id = %(batch_id)s
     AND (deleted_at IS NULL AND NOT (%(archived)s::boolean AND archived_at IS NOT NULL)) IS TRUE
  RETURNING id, owner, dialect
),
files AS (
  UPDATE penstock.files SET deleted_at = @now
   WHERE batch_id = %(batch_id)s AND deleted_at IS NULL
),
uncounted AS (
  DELETE FROM penstock.progress WHERE batch_id = %(batch_id)s
),
-- Claims would look at these deferrals in vain until they are gone.
parked AS (
  UPDATE penstock.deferrals SET held = true WHERE batch_id = %(batch_id)s AND NOT held
),
erasure AS (
  INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)
  SELECT %(erasure_id)s, owner,
         CASE WHEN %(archived)s::boolean THEN 'message_batch_results'
              WHEN dialect = 'anthropic' THEN 'message_batch'
              ELSE 'batch' END,
         id, @now
    FROM batch
  -- Its input was deleted under the same erasure id just before, as a part of it.
  ON CONFLICT (id) DO UPDATE SET kind = excluded.kind, object_id = excluded.object_id
)
INSERT INTO penstock.erasure_pieces (erasure_id, what, key, batch_id, next, total)
SELECT %(erasure_id)s, part.what, l.id, batch.id, n, least(n + %(stretch)s, l.next)
  FROM batch
  JOIN penstock.lanes l ON l.batch_id = batch.id
 CROSS JOIN (VALUES ('outcomes'), ('attempts')) AS part (what)
 CROSS JOIN LATERAL generate_series(0, l.next - 1, %(stretch)s::int4) AS n
UNION ALL
SELECT %(erasure_id)s, 'reclaims', l.id, batch.id, 0, %(beyond)s
  FROM batch JOIN penstock.lanes l ON l.batch_id = batch.id AND l.next > 0
UNION ALL
SELECT %(erasure_id)s, part.what, NULL, batch.id, 0, %(beyond)s
  FROM batch, (VALUES ('journal'), ('deferrals'), ('samples')) AS part (what)

-- name: hold_session_if_there
-- Locks a session against other deletions and changes of its settings.
SELECT id FROM penstock.sessions
 WHERE place = ARRAY[%(owner)s::text, %(key)s]
   FOR UPDATE

-- name: erase_session_if_held
-- Deletes a session for everybody, and lists the rows to be deleted of it. Its lane is past its deadline from now on:
-- an accept that waits for the lane in order to append to it sees so that the session is gone.
WITH session AS (
  UPDATE penstock.sessions SET deleted_at = @now
   WHERE id = %(session_id)s AND (deleted_at IS NULL) IS TRUE
  RETURNING id, owner, lane_id
),
lane AS (
  UPDATE penstock.lanes SET open = false, deadline = '-infinity'
   WHERE id = (SELECT lane_id FROM session)
  RETURNING id, source_id, total
),
erasure AS (
  INSERT INTO penstock.erasures (id, owner, kind, object_id, requested_at)
  SELECT %(erasure_id)s, owner, 'session', id, @now FROM session
),
-- Callers that wait for an answer look again.
notified AS MATERIALIZED (
  SELECT pg_notify('penstock_answers', id::text) FROM lane
)
INSERT INTO penstock.erasure_pieces (erasure_id, what, key, batch_id, source_lane, next, total)
SELECT %(erasure_id)s, part.what, CASE part.what WHEN 'templates' THEN lane.source_id ELSE lane.id END,
       %(session_id)s, 0, n, least(n + %(stretch)s, lane.total)
  FROM lane
 CROSS JOIN (VALUES ('templates'), ('outcomes'), ('attempts'), ('session_requests')) AS part (what)
 CROSS JOIN LATERAL generate_series(0, lane.total - 1, %(stretch)s::int4) AS n
UNION ALL
SELECT %(erasure_id)s, 'reclaims', lane.id, %(session_id)s, NULL, 0, %(beyond)s FROM lane, notified
UNION ALL
SELECT %(erasure_id)s, 'deferrals', NULL, %(session_id)s, NULL, 0, %(beyond)s FROM lane

-- name: list_old_sessions
-- A page of the sessions that were made before a time, and whether each has been unused since. Ids sort by the time they
-- were made at. The last use of a session is known to the minute.
SELECT s.id, s.owner, s.key, coalesce(l.unused, true)
  FROM (SELECT id, owner, key, lane_id FROM penstock.sessions
         WHERE id > %(after)s AND (deleted_at IS NULL) IS TRUE
           AND id < (SELECT (lpad(to_hex((extract(epoch FROM @now
                                                             - make_interval(secs => %(kept_s)s)) * 1000)::int8), 12, '0')
                             || repeat('0', 20))::uuid)
         ORDER BY id
         LIMIT %(limit)s) AS s
  LEFT JOIN LATERAL (
    SELECT next = total AND busy = 0
           AND coalesce(to_timestamp(tag), created_at)
               <= @now - make_interval(secs => %(kept_s)s + 60) AS unused
      FROM penstock.lanes WHERE id = s.lane_id
     LIMIT 1) AS l ON true
 ORDER BY s.id

-- name: is_in_use
-- Whether any request of a session waits, is under way, or was answered less than `kept_s` ago. For a transaction that
-- has locked its lane.
SELECT EXISTS (
  SELECT FROM penstock.lanes
   WHERE id = (SELECT lane_id FROM penstock.sessions WHERE id = %(session_id)s)
     AND NOT (next = total AND busy = 0
              AND coalesce(to_timestamp(tag), created_at)
                  <= @now - make_interval(secs => %(kept_s)s + 60)))

-- name: list_expired
-- Files that have expired. An input that some batch still needs waits for the end of that batch.
SELECT f.id FROM penstock.files f
 WHERE f.expires_at <= @now AND f.state = 'ready' AND f.deleted_at IS NULL
   AND NOT EXISTS (SELECT FROM penstock.batches b
                    WHERE b.file_id = f.id AND b.completed IS NULL AND b.deleted_at IS NULL)
 ORDER BY f.expires_at
 LIMIT %(limit)s

-- name: list_archivable
-- Message batches that ended, and whose results have been kept long enough.
SELECT id FROM penstock.batches
 WHERE dialect = 'anthropic' AND completed IS NOT NULL AND archived_at IS NULL AND deleted_at IS NULL
   AND created_at <= @now - make_interval(secs => %(kept_s)s)
 ORDER BY created_at
 LIMIT %(limit)s

-- name: take_piece
-- Locks the next stretch that no other replica has locked. By these locks replicas share the work out: none waits, none
-- repeats. Several deletions may have listed the same rows: their stretches are worked on one after the other, oldest
-- first. A deletion lists stretches while it holds the batch, so that an older one can be seen from here; once it is
-- seen to be done, its rows are gone.
-- Not NOT EXISTS, which may be answered by reading all of them.
SELECT p.id, p.erasure_id, p.what, p.key, p.batch_id, p.source_lane, p.next, p.total
  FROM penstock.erasure_pieces p
 WHERE p.next < p.total AND p.id > %(after)s
   AND (SELECT older.id FROM penstock.erasure_pieces older
         WHERE older.place = p.place AND older.id < p.id AND older.next < older.total
           AND older.next < p.total AND older.total > p.next
         LIMIT 1) IS NULL
 ORDER BY p.id
 LIMIT 1
   FOR UPDATE OF p SKIP LOCKED

-- name: advance_piece
-- Records how far the stretch is done.
UPDATE penstock.erasure_pieces SET next = %(next)s, erased = erased + %(erased)s WHERE id = %(id)s

-- name: erase_templates
-- Deletes the next templates of a source lane, and returns where to go on. This and each `erase_` statement below goes
-- on where the one before it ended: starting over would walk past everything deleted before.
WITH edge AS MATERIALIZED (
  SELECT ordinal FROM penstock.templates
   WHERE source_id = %(key)s AND source_lane = %(source_lane)s AND ordinal >= %(next)s::int4
     AND ordinal < %(total)s::int4
   ORDER BY ordinal
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.templates
   WHERE source_id = %(key)s AND source_lane = %(source_lane)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4)
  RETURNING ordinal
),
-- Keys of rows that a processor added to its job.
no_key AS (
  DELETE FROM penstock.row_keys
   WHERE source_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4)
)
SELECT coalesce((SELECT ordinal FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_chunks
-- Deletes the next chunks of an upload. Each is large.
WITH gone AS (
  DELETE FROM penstock.file_chunks
   WHERE source_id = %(key)s AND chunk >= %(next)s::int4
     AND chunk < least(%(next)s + greatest(%(rows)s / 100, 1), %(total)s)::int4
  RETURNING chunk
)
SELECT least(%(next)s + greatest(%(rows)s / 100, 1), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_outcomes
-- Deletes the next outcomes of a lane.
WITH edge AS MATERIALIZED (
  SELECT ordinal FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < %(total)s::int4
   ORDER BY ordinal
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4)
  RETURNING ordinal
)
SELECT coalesce((SELECT ordinal FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_completed
-- Deletes the completed outcomes among a lane's next outcomes.
WITH edge AS MATERIALIZED (
  SELECT ordinal FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < %(total)s::int4
   ORDER BY ordinal
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4) AND state = 'completed'
  RETURNING ordinal
)
SELECT coalesce((SELECT ordinal FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_not_completed
-- Deletes the next outcomes of a lane that are not completed: they have an index of their own.
WITH edge AS MATERIALIZED (
  SELECT ordinal FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < %(total)s::int4 AND state <> 'completed'
   ORDER BY ordinal
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.outcomes
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4) AND state <> 'completed'
  RETURNING ordinal
)
SELECT coalesce((SELECT ordinal FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_attempts
-- Deletes the attempts of a lane's next inputs, of one input at least.
WITH edge AS MATERIALIZED (
  SELECT greatest(ordinal, %(next)s::int4 + 1) AS ordinal FROM penstock.attempts
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < %(total)s::int4
   ORDER BY attempts.ordinal
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.attempts
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), %(total)s::int4)
  RETURNING ordinal
)
SELECT coalesce((SELECT ordinal FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_session_requests
-- Deletes a session's next requests, with the streamed pieces on their way to the callers. Statements that announce
-- answers or delete pieces know nothing of the deletion: this goes as far as the first row that another transaction
-- has locked, and on from there the next time.
WITH page AS MATERIALIZED (
  SELECT ordinal, id FROM penstock.session_requests
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < least(%(next)s + %(rows)s, %(total)s)::int4
),
request AS MATERIALIZED (
  SELECT id FROM penstock.session_requests
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4 AND ordinal < least(%(next)s + %(rows)s, %(total)s)::int4
     FOR UPDATE SKIP LOCKED
),
piece AS MATERIALIZED (
  SELECT request_id, lease_id, piece FROM penstock.session_stream
   WHERE request_id = ANY (ARRAY(SELECT id FROM page))
     FOR UPDATE SKIP LOCKED
),
held AS (
  SELECT id FROM page WHERE (id IN (SELECT id FROM request)) IS NOT TRUE
  UNION ALL
  SELECT request_id FROM penstock.session_stream
   WHERE request_id = ANY (ARRAY(SELECT id FROM page))
     AND ((request_id, lease_id, piece) IN (SELECT request_id, lease_id, piece FROM piece)) IS NOT TRUE
),
edge AS MATERIALIZED (
  SELECT min(ordinal) AS ordinal FROM page WHERE (id IN (SELECT id FROM held)) IS TRUE
),
gone AS (
  DELETE FROM penstock.session_requests
   WHERE lane_id = %(key)s AND ordinal >= %(next)s::int4
     AND ordinal < coalesce((SELECT ordinal FROM edge), least(%(next)s + %(rows)s, %(total)s)::int4)
  RETURNING id
),
streamed AS (
  DELETE FROM penstock.session_stream WHERE request_id = ANY (ARRAY(SELECT id FROM gone))
)
SELECT coalesce((SELECT ordinal FROM edge), least(%(next)s + %(rows)s, %(total)s)), (SELECT count(*) FROM gone)

-- name: erase_reclaims
-- Deletes a lane's next reclaims.
WITH edge AS MATERIALIZED (
  SELECT id FROM penstock.reclaims
   WHERE lane_id = %(key)s AND id >= %(next)s
   ORDER BY id
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.reclaims
   WHERE lane_id = %(key)s AND id >= %(next)s AND id < coalesce((SELECT id FROM edge), %(total)s)
  RETURNING id
)
SELECT coalesce((SELECT id FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_journal
-- Deletes the next entries of a batch's journal, those of one transaction at least.
WITH edge AS MATERIALIZED (
  SELECT greatest(xact::text::int8, %(next)s + 1) AS xact FROM penstock.journal
   WHERE batch_id = %(batch_id)s AND xact >= %(next)s::text::xid8
   ORDER BY journal.xact, id
  OFFSET %(rows)s
   LIMIT 1
),
gone AS (
  DELETE FROM penstock.journal
   WHERE batch_id = %(batch_id)s AND xact >= %(next)s::text::xid8
     AND xact < coalesce((SELECT xact FROM edge), %(total)s)::text::xid8
  RETURNING id
)
SELECT coalesce((SELECT xact FROM edge), %(total)s), (SELECT count(*) FROM gone)

-- name: erase_samples
-- Deletes some of a batch's samples. Maintenance may be summing them up: the stretch is done when none was seen.
WITH seen AS MATERIALIZED (
  SELECT id FROM penstock.samples WHERE batch_id = %(batch_id)s LIMIT %(rows)s
),
gone AS (
  DELETE FROM penstock.samples WHERE batch_id = %(batch_id)s AND id = ANY (ARRAY(SELECT id FROM seen))
  RETURNING id
)
SELECT CASE WHEN (SELECT count(*) FROM seen) > 0 THEN %(next)s ELSE %(total)s END, (SELECT count(*) FROM gone)

-- name: erase_deferrals
-- Deletes some of a batch's deferrals. Claims and maintenance lock the rows they look at, and this waits for none of
-- them: the stretch is done when no row was locked.
WITH free AS MATERIALIZED (
  SELECT id FROM penstock.deferrals WHERE batch_id = %(batch_id)s LIMIT %(rows)s FOR UPDATE SKIP LOCKED
),
gone AS (
  DELETE FROM penstock.deferrals WHERE id = ANY (ARRAY(SELECT id FROM free))
  RETURNING id
),
seen AS (
  SELECT FROM penstock.deferrals WHERE batch_id = %(batch_id)s LIMIT %(rows)s + 1
)
SELECT CASE WHEN (SELECT count(*) FROM seen) > count(*) THEN %(next)s ELSE %(total)s END, count(*) FROM gone

-- name: list_emptied
-- Erasures that have no stretch left and are not finished: two replicas that delete the last two stretches at once each
-- leave finishing to the other.
SELECT e.id
  FROM penstock.erasures e
 WHERE e.finished_at IS NULL
   AND NOT EXISTS (SELECT FROM penstock.erasure_pieces p WHERE p.erasure_id = e.id AND p.next < p.total)
 ORDER BY e.id
 LIMIT %(limit)s

-- name: finish_erasure_if_empty
-- Finishes an erasure that has no stretch left: the rows of the file, batch or session itself go, the report stays. It
-- waits for no lock: if another transaction holds one of these rows, it is left for the next time.
WITH done AS MATERIALIZED (
  SELECT e.id, e.kind, e.object_id
    FROM penstock.erasures e
   WHERE e.id = %(id)s AND e.finished_at IS NULL
     AND NOT EXISTS (SELECT FROM penstock.erasure_pieces p WHERE p.erasure_id = e.id AND p.next < p.total)
     FOR UPDATE SKIP LOCKED
),
every_file AS MATERIALIZED (
  SELECT object_id AS id FROM done WHERE kind IN ('file', 'output', 'errors', 'upload')
  UNION ALL
  SELECT id FROM penstock.files
   WHERE batch_id = (SELECT object_id FROM done WHERE kind IN ('batch', 'message_batch')) AND batch_id IS NOT NULL
  UNION ALL
  SELECT id FROM penstock.files
   WHERE source_id = ANY (ARRAY(
     SELECT key FROM penstock.erasure_pieces
      WHERE erasure_id = (SELECT id FROM done WHERE kind IN ('batch', 'message_batch', 'message_batch_results'))
        AND what IN ('templates', 'chunks')))
),
piece AS MATERIALIZED (
  SELECT id, what, erased FROM penstock.erasure_pieces WHERE erasure_id = (SELECT id FROM done) FOR UPDATE SKIP LOCKED
),
file AS MATERIALIZED (
  SELECT id, source_id, kind FROM penstock.files WHERE id = ANY (ARRAY(SELECT id FROM every_file)) FOR UPDATE SKIP LOCKED
),
batch AS MATERIALIZED (
  SELECT id FROM penstock.batches WHERE id = (SELECT object_id FROM done WHERE kind IN ('batch', 'message_batch')) FOR UPDATE SKIP LOCKED
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE batch_id = (SELECT object_id FROM done WHERE kind IN ('batch', 'message_batch', 'session'))
     FOR UPDATE SKIP LOCKED
),
session AS MATERIALIZED (
  SELECT id FROM penstock.sessions WHERE id = (SELECT object_id FROM done WHERE kind = 'session') FOR UPDATE SKIP LOCKED
),
delta AS MATERIALIZED (
  SELECT batch_id, id FROM penstock.progress WHERE batch_id = (SELECT object_id FROM done WHERE kind IN ('batch', 'message_batch'))
     FOR UPDATE SKIP LOCKED
),
-- The samples of error groups quote requests: they go with the errors, or with the output if there are none.
grouped AS MATERIALIZED (
  SELECT object_id AS batch_id FROM done WHERE kind IN ('batch', 'message_batch', 'message_batch_results')
  UNION ALL
  SELECT f.batch_id FROM penstock.files f
   WHERE f.id = (SELECT object_id FROM done WHERE kind IN ('output', 'errors'))
     AND (f.kind = 'errors'
          OR NOT EXISTS (SELECT FROM penstock.files o WHERE o.batch_id = f.batch_id AND o.deleted_at IS NULL))
),
error AS MATERIALIZED (
  SELECT batch_id, id FROM penstock.job_errors WHERE batch_id = (SELECT batch_id FROM grouped) FOR UPDATE SKIP LOCKED
),
job AS MATERIALIZED (
  SELECT batch_id FROM penstock.jobs WHERE batch_id = (SELECT object_id FROM done WHERE kind = 'batch')
     FOR UPDATE SKIP LOCKED
),
free AS MATERIALIZED (
  SELECT done.*
    FROM done
   WHERE (SELECT count(*) FROM piece) = (SELECT count(*) FROM penstock.erasure_pieces WHERE erasure_id = done.id)
     AND (SELECT count(*) FROM file)
         = (SELECT count(*) FROM penstock.files WHERE id = ANY (ARRAY(SELECT id FROM every_file)))
     AND (SELECT count(*) FROM error)
         = (SELECT count(*) FROM penstock.job_errors WHERE batch_id = (SELECT batch_id FROM grouped))
     AND (done.kind <> 'session'
          OR (SELECT count(*) FROM session) = (SELECT count(*) FROM penstock.sessions WHERE id = done.object_id)
             AND (SELECT count(*) FROM lane) = (SELECT count(*) FROM penstock.lanes WHERE batch_id = done.object_id))
     AND (done.kind NOT IN ('batch', 'message_batch')
          OR (SELECT count(*) FROM batch) = (SELECT count(*) FROM penstock.batches WHERE id = done.object_id)
             AND (SELECT count(*) FROM lane) = (SELECT count(*) FROM penstock.lanes WHERE batch_id = done.object_id)
             AND (SELECT count(*) FROM delta) = (SELECT count(*) FROM penstock.progress WHERE batch_id = done.object_id)
             AND (SELECT count(*) FROM job) = (SELECT count(*) FROM penstock.jobs WHERE batch_id = done.object_id))
),
no_piece AS (
  DELETE FROM penstock.erasure_pieces WHERE id = ANY (ARRAY(SELECT piece.id FROM piece, free))
),
no_file AS (
  DELETE FROM penstock.files WHERE id = ANY (ARRAY(SELECT file.id FROM file, free))
),
no_file_lane AS (
  DELETE FROM penstock.file_lanes
   WHERE source_id = ANY (ARRAY(SELECT file.source_id FROM file, free WHERE file.kind = 'input'))
),
no_delta AS (
  DELETE FROM penstock.progress WHERE batch_id = (SELECT object_id FROM free WHERE kind IN ('batch', 'message_batch'))
),
no_head AS (
  DELETE FROM penstock.journal_heads
   WHERE batch_id = (SELECT object_id FROM free WHERE kind IN ('batch', 'message_batch'))
),
no_column AS (
  DELETE FROM penstock.job_columns WHERE batch_id = (SELECT object_id FROM free WHERE kind = 'batch')
),
no_error AS (
  DELETE FROM penstock.job_errors WHERE batch_id = (SELECT grouped.batch_id FROM grouped, free)
),
no_operation AS (
  DELETE FROM penstock.operations WHERE batch_id = (SELECT object_id FROM free WHERE kind = 'batch')
),
no_job AS (
  DELETE FROM penstock.jobs WHERE batch_id = (SELECT object_id FROM free WHERE kind = 'batch')
),
no_lane AS (
  DELETE FROM penstock.lanes WHERE id = ANY (ARRAY(SELECT lane.id FROM lane, free))
),
no_batch AS (
  DELETE FROM penstock.batches WHERE id = (SELECT object_id FROM free WHERE kind IN ('batch', 'message_batch'))
),
no_session AS (
  DELETE FROM penstock.sessions WHERE id = (SELECT object_id FROM free WHERE kind = 'session')
)
UPDATE penstock.erasures
   SET finished_at = @now,
       templates = (SELECT coalesce(sum(erased), 0) FROM piece WHERE what = 'templates'),
       chunks = (SELECT coalesce(sum(erased), 0) FROM piece WHERE what = 'chunks'),
       outcomes = (SELECT coalesce(sum(erased), 0) FROM piece WHERE what IN ('outcomes', 'completed', 'not_completed')),
       attempts = (SELECT coalesce(sum(erased), 0) FROM piece WHERE what = 'attempts'),
       others = (
         SELECT coalesce(sum(erased), 0) FROM piece
          WHERE what IN ('reclaims', 'journal', 'deferrals', 'session_requests', 'blobs', 'samples'))
 WHERE id = (SELECT id FROM free)
RETURNING id

-- name: read_erasures
-- Erasure reports, newest first: one, or an owner's from an id on. Until it is finished, an erasure's rows are counted by
-- its stretches.
SELECT e.id, e.owner, e.kind, e.object_id, e.requested_at, e.finished_at,
       e.templates + p.templates, e.chunks + p.chunks, e.outcomes + p.outcomes, e.attempts + p.attempts,
       e.others + p.others
  FROM (SELECT * FROM penstock.erasures
         WHERE (%(owner)s::text IS NULL OR owner = %(owner)s::text) AND id < %(below)s AND id >= %(from)s
         ORDER BY id DESC
         LIMIT %(limit)s) AS e
 CROSS JOIN LATERAL (
   SELECT coalesce(sum(erased) FILTER (WHERE what = 'templates'), 0)::int8 AS templates,
          coalesce(sum(erased) FILTER (WHERE what = 'chunks'), 0)::int8 AS chunks,
          coalesce(sum(erased) FILTER (WHERE what IN ('outcomes', 'completed', 'not_completed')), 0)::int8 AS outcomes,
          coalesce(sum(erased) FILTER (WHERE what = 'attempts'), 0)::int8 AS attempts,
          coalesce(sum(erased) FILTER (
            WHERE what IN ('reclaims', 'journal', 'deferrals', 'session_requests', 'blobs', 'samples')), 0)::int8 AS others
     FROM penstock.erasure_pieces WHERE erasure_id = e.id) AS p
 ORDER BY e.id DESC

-- name: list_ended
-- The next batches by id, and whether each ended longer ago than it is kept.
SELECT id,
       coalesce(completed_at, cancelled_at, expired_at, failed_at) < @now - make_interval(secs => %(kept_s)s)
         AND deleted_at IS NULL AND dialect <> 'anthropic' AS is_old
  FROM penstock.batches
 WHERE id > %(after)s
 ORDER BY id
 LIMIT %(limit)s
