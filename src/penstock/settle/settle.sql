-- name: settle_if_leased
-- Records the results of leased ordinals, in one statement: outcomes, deferrals, history, counters, the lease, and the
-- journal that followers of the batch read; and notifies callers who wait for sessions' answers, with one notice.
-- Only ordinals that a lease of this worker still holds are written; the others were fenced and change nothing.
-- Counters come from the rows written: an outcome that exists already would fail the statement. Leases are locked in
-- id order, so two settles cannot deadlock. A lease is known by its nonce: its id finds the row, and may have been given
-- out again after a restore.
-- Rows are addressed by id = ANY(...), which stays an index probe however many dead versions surround them, and the
-- values of each are found in arrays sorted by nonce (width_bucket halves its way there). Joins in its place depend on
-- estimates: for a thousand sessions they became loops within loops. The worker is compared in a way that no index
-- serves: the index over workers leads past every lease this worker ever held.
WITH held AS MATERIALIZED (
  SELECT id, nonce, lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims,
         generation, spent, ordinals - (%(gone)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])] AS remaining,
         ordinals * (%(completed)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])] AS completed,
         ordinals * (%(others)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])] AS others
    FROM penstock.leases
   WHERE id = ANY (%(leases)b::int8[]) AND worker_id IS NOT DISTINCT FROM %(worker)b::uuid
     AND nonce = (%(nonces)b::int8[])[width_bucket(nonce, %(nonces)b::int8[])]
   ORDER BY id
     FOR UPDATE
),
-- Numbers that every row has are looked up by the row's number where they are needed: each array to unnest would be
-- copied twice on the way.
final AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.session, h.limited, h.spent + h.attempt AS attempts, h.generation,
         f.*
    FROM unnest(%(f_nonce)b::int8[], %(f_ordinal)b::int4[], %(f_state)b::text[], %(f_status)b::int4[],
                %(f_custom_id)b::text[], %(f_request_id)b::text[], %(f_error_code)b::text[],
                %(f_error_message)b::text[], %(f_response)b::bytea[])
         WITH ORDINALITY
         AS f (nonce, ordinal, state, status_code, custom_id, request_id, error_code, error_message, response, n)
    JOIN held h ON h.nonce = f.nonce AND h.ordinals @> f.ordinal
),
-- Retries: due times are rounded up to a quarter of the power of two below the delay, so that equal ones share a row.
again AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.owner, h.session, h.band, h.weight, h.pool, h.route, h.limited,
         h.attempt, h.reclaims, h.generation, h.spent, a.*,
         CASE WHEN h.session OR a.delay_s <= 0
              THEN @now + make_interval(secs => a.delay_s)
              ELSE to_timestamp(
                ceil((extract(epoch FROM @now)::float8 + a.delay_s) / q.s) * q.s) END AS due_at
    FROM unnest(%(a_nonce)b::int8[], %(a_ordinal)b::int4[], %(a_status)b::int4[], %(a_code)b::text[],
                %(a_message)b::text[], %(a_delay_s)b::float8[], %(a_counted)b::bool[], %(a_duration_ms)b::int4[])
         AS a (nonce, ordinal, status_code, code, message, delay_s, counted, duration_ms)
    JOIN held h ON h.nonce = a.nonce AND h.ordinals @> a.ordinal
   CROSS JOIN LATERAL (SELECT 2 ^ floor(ln(greatest(a.delay_s, 0.001)) / ln(2.0::float8)) / 4 AS s) AS q
),
back AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.owner, h.session, h.band, h.weight, h.pool, h.route, h.limited,
         h.attempt, h.reclaims, h.generation, h.spent, h.ordinals * b.ordinals AS ordinals
    FROM unnest(%(b_nonce)b::int8[], %(b_ordinals)s::int4multirange[]) AS b (nonce, ordinals)
    JOIN held h ON h.nonce = b.nonce AND h.ordinals && b.ordinals
),
written AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, line, state, status_code, attempts, lease_id, lease_nonce, finished_at, custom_id, request_id,
     error_code, error_message, fingerprint, response)
  SELECT lane_id, ordinal, (%(f_line)b::int4[])[n], state::penstock.outcome_state, status_code, attempts, lease_id,
         nonce, @now, custom_id, request_id, error_code, error_message, (%(f_fingerprint)b::int8[])[n], response
    FROM final
   WHERE generation = 0
),
-- Outcomes of inputs that were run again replace the old ones, under the new lease.
replaced AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, generation, line, state, status_code, attempts, lease_id, lease_nonce, finished_at, custom_id,
     request_id, error_code, error_message, fingerprint, response)
  SELECT lane_id, ordinal, generation, (%(f_line)b::int4[])[n], state::penstock.outcome_state, status_code, attempts,
         lease_id, nonce, @now, custom_id, request_id, error_code, error_message, (%(f_fingerprint)b::int8[])[n], response
    FROM final
   WHERE generation > 0
  ON CONFLICT (lane_id, ordinal) DO UPDATE
     SET generation = excluded.generation, state = excluded.state, status_code = excluded.status_code,
         attempts = excluded.attempts, lease_id = excluded.lease_id, lease_nonce = excluded.lease_nonce,
         finished_at = excluded.finished_at, request_id = excluded.request_id, error_code = excluded.error_code,
         error_message = excluded.error_message, fingerprint = excluded.fingerprint, response = excluded.response
),
-- Errors of batches are counted by their fingerprint, which sessions' requests have none of.
grouped AS (
  INSERT INTO penstock.job_errors (batch_id, fingerprint, count, first_at, last_at, code, status_code, line, message)
  SELECT batch_id, fingerprint, count(*), @now, @now, (array_agg(coalesce(error_code, state) ORDER BY n DESC))[1],
         (array_agg(status_code ORDER BY n DESC))[1], (array_agg((%(f_line)b::int4[])[n] ORDER BY n DESC))[1],
         (array_agg(coalesce(error_message, '') ORDER BY n DESC))[1]
    FROM final
   CROSS JOIN LATERAL (SELECT (%(f_fingerprint)b::int8[])[n] AS fingerprint) AS of_error
   WHERE %(f_fingerprint)b::int8[] <> '{}' AND fingerprint IS NOT NULL
   GROUP BY batch_id, fingerprint
),
-- Ordinals given back go to the head of the line: their owner was charged for them already. Deferrals of a paused batch
-- are held at once, however long ago the pause was.
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims, generation,
     spent, reason, deferred_at, due_at, tag, held)
  SELECT lane_id, batch_id, owner, session, band, weight, pool, route, limited,
         range_agg(int4range(ordinal, ordinal + 1)), attempt + counted::int4, reclaims, generation, spent, 'retry',
         @now, due_at, NULL,
         coalesce((SELECT NOT (l.open OR l.session) FROM penstock.lanes l WHERE l.id = lane_id), false)
    FROM again
   GROUP BY lane_id, batch_id, owner, session, band, weight, pool, route, limited, attempt + counted::int4, reclaims,
            generation, spent, due_at
  UNION ALL
  SELECT lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims,
         generation, spent, 'given_back', @now, @now,
         CASE WHEN session THEN extract(epoch FROM @now)
              ELSE penstock.line_start(pool, route, band, '-infinity') END,
         coalesce((SELECT NOT (l.open OR l.session) FROM penstock.lanes l WHERE l.id = lane_id), false)
    FROM back
),
noted AS (
  INSERT INTO penstock.attempts
    (lane_id, ordinal, attempt, lease_id, lease_nonce, worker_id, ended_at, duration_ms, counted, status_code,
     error_code, error_message, not_before)
  SELECT lane_id, ordinal, spent + attempt, lease_id, nonce, %(worker)b::uuid, @now,
         duration_ms, counted, status_code, code, message, due_at
    FROM again
  UNION ALL
  SELECT lane_id, ordinal, attempts, lease_id, nonce, %(worker)b::uuid, @now,
         (%(f_duration_ms)b::int4[])[n], true, status_code, coalesce(error_code, state), coalesce(error_message, ''), NULL
    FROM final
   -- An input that was cancelled before it was sent had no attempt.
   WHERE state <> 'completed' AND NOT (limited AND state = 'skipped' AND error_code IS NOT DISTINCT FROM 'cancelled')
),
shrunk AS (
  UPDATE penstock.leases
     SET ordinals = ordinals - (%(gone)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])],
         progressed_at = @now
   WHERE id = ANY (ARRAY(SELECT id FROM held WHERE NOT isempty(remaining)))
),
ended AS (
  DELETE FROM penstock.leases
   WHERE id = ANY (ARRAY(SELECT id FROM held WHERE isempty(remaining)))
),
room AS MATERIALIZED (
  SELECT array_agg(lane_id ORDER BY lane_id) AS lanes, array_agg(count ORDER BY lane_id) AS counts
    FROM (SELECT lane_id, count(*)::int4 FROM final WHERE limited GROUP BY lane_id) AS n
),
-- Lanes are locked in id order, as a pause or a cancel does.
roomy AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE id = ANY (ARRAY(SELECT lane_id FROM final WHERE limited))
   ORDER BY id
     FOR UPDATE
),
-- A session's lane goes to the end of the line, with the pool, route and endpoint of its next request. A request that
-- this statement cannot see was accepted since, into an empty queue: then accepting it has set them.
-- The lane's place in line is the time it became ready, which is in an index. Where no request waits it moves once a
-- minute, which shows that the session is in use, and the other updates touch no index.
-- A job that was full stood in no line: it comes back where the others are by now, not where it left.
freed AS (
  UPDATE penstock.lanes l
     SET busy = busy - (SELECT counts FROM room)[width_bucket(id, (SELECT lanes FROM room))],
         (pool, route, endpoint) = (
           SELECT coalesce(max(r.pool), l.pool), coalesce(max(r.route), l.route), coalesce(max(r.endpoint), l.endpoint)
             FROM penstock.session_requests r
            WHERE r.lane_id = l.id AND r.ordinal = l.next),
         tag = CASE WHEN session AND (next < total OR tag < extract(epoch FROM @now) - 60)
                    THEN extract(epoch FROM @now)
                    WHEN NOT session AND busy = width
                    THEN greatest(tag, penstock.line_start(pool, route, band, '-infinity') + step) ELSE tag END,
         open = open AND NOT (blocks AND id = ANY (ARRAY(
           SELECT lane_id FROM final WHERE limited AND state IN ('failed', 'not_found'))))
   WHERE id = ANY (ARRAY(SELECT id FROM roomy))
  RETURNING l.runnable, CASE WHEN l.next < l.total AND EXISTS (
    SELECT FROM penstock.session_requests r
     WHERE r.lane_id = l.id AND r.ordinal = l.next AND r.cancelled_at IS NOT NULL) THEN l.batch_id END AS passes_over
),
followed AS (
  INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)
  SELECT batch_id, lane_id, range_agg(completed), range_agg(others), @now
    FROM held
   WHERE NOT session AND NOT (isempty(completed) AND isempty(others))
   GROUP BY batch_id, lane_id
),
-- Progress is kept for batches alone: sessions have no figures.
counted AS (
  INSERT INTO penstock.progress
    (batch_id, completed, failed, not_found, skipped, retried, output_bytes, error_bytes, input_tokens, cached_tokens,
     output_tokens, reasoning_tokens)
  SELECT batch_id,
         count(*) FILTER (WHERE what = 'completed'), count(*) FILTER (WHERE what = 'failed'),
         count(*) FILTER (WHERE what = 'not_found'), count(*) FILTER (WHERE what = 'skipped'),
         count(*) FILTER (WHERE what = 'retry'),
         coalesce(sum((%(f_bytes)b::int4[])[n]) FILTER (WHERE what = 'completed'), 0),
         coalesce(sum((%(f_bytes)b::int4[])[n]) FILTER (WHERE what <> 'completed'), 0),
         coalesce(sum((%(f_input_tokens)b::int4[])[n]), 0), coalesce(sum((%(f_cached_tokens)b::int4[])[n]), 0),
         coalesce(sum((%(f_output_tokens)b::int4[])[n]), 0), coalesce(sum((%(f_reasoning_tokens)b::int4[])[n]), 0)
    FROM (SELECT batch_id, state AS what, n FROM final WHERE NOT session
          UNION ALL
          SELECT batch_id, 'retry', NULL FROM again WHERE NOT session) AS moved
   GROUP BY batch_id
),
notified AS MATERIALIZED (
  SELECT pg_notify('penstock_answers', %(notify)s::text)
   WHERE %(notify)s::text IS NOT NULL AND EXISTS (SELECT FROM final WHERE session)
  UNION ALL
  -- Other workers may be idle.
  SELECT pg_notify('penstock_work', pool) FROM (SELECT DISTINCT pool FROM back) AS given_back
)
SELECT (SELECT count(*) FROM final)::int4 AS outcomes,
       (SELECT count(*) FROM again)::int4 AS retries,
       (SELECT coalesce(sum(penstock.ordinal_count(ordinals)), 0) FROM back)::int4 AS given_back,
       EXISTS (SELECT FROM freed WHERE runnable) AS more,
       ARRAY(SELECT passes_over FROM freed WHERE passes_over IS NOT NULL) AS cancelled_next, @now AS at,
       (SELECT count(*) FROM notified) AS notified

-- name: settle_answer_if_leased
-- Records a single completed request of a session, like settle_if_leased at half the cost: the case that callers wait
-- for most. Locks in the same order, lease and lane.
WITH held AS (
  DELETE FROM penstock.leases
   WHERE id = %(lease)s
     AND (nonce = %(nonce)s AND worker_id = %(worker)b::uuid
          AND ordinals = int4multirange(int4range(%(ordinal)s, %(ordinal)s + 1))) IS TRUE
  RETURNING lane_id, spent + attempt AS attempts, generation
),
written AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, generation, line, state, status_code, attempts, lease_id, lease_nonce, finished_at, custom_id,
     request_id, response)
  SELECT lane_id, %(ordinal)s, generation, %(line)s, 'completed', %(status)s::int4, attempts, %(lease)s, %(nonce)s,
         @now, %(custom_id)s, %(request_id)s::text, %(response)b::bytea
    FROM held
),
freed AS (
  UPDATE penstock.lanes l
     SET busy = busy - 1,
         (pool, route, endpoint) = (
           SELECT coalesce(max(r.pool), l.pool), coalesce(max(r.route), l.route), coalesce(max(r.endpoint), l.endpoint)
             FROM penstock.session_requests r
            WHERE l.next < l.total AND r.lane_id = l.id AND r.ordinal = l.next),
         tag = CASE WHEN next < total OR tag < extract(epoch FROM @now) - 60
                    THEN extract(epoch FROM @now) ELSE tag END
   WHERE id = (SELECT lane_id FROM held)
  RETURNING l.runnable, CASE WHEN l.next < l.total AND EXISTS (
    SELECT FROM penstock.session_requests r
     WHERE r.lane_id = l.id AND r.ordinal = l.next AND r.cancelled_at IS NOT NULL) THEN l.batch_id END AS passes_over
),
notified AS MATERIALIZED (
  SELECT pg_notify('penstock_answers', %(notify)s::text) FROM held WHERE %(notify)s::text IS NOT NULL
)
SELECT freed.runnable, freed.passes_over, @now, (SELECT count(*) FROM notified) FROM freed

-- name: hold_sessions_lanes
-- Locks sessions' lanes before the next statement, which must see every request that was accepted into them.
SELECT id FROM penstock.lanes WHERE batch_id = ANY (%(sessions)s::uuid[]) AND session ORDER BY id FOR UPDATE

-- name: settle_cancelled_if_next
-- Passes over cancelled requests that would be next in their session, whichever pool they are for: its provider may be
-- halted or removed, and the requests behind them are for others. Also a cancelled head that waits for another try.
WITH lane AS MATERIALIZED (
  SELECT id, batch_id, next, busy FROM penstock.lanes WHERE id = ANY (%(lanes)s::int8[]) AND deadline = 'infinity'
),
put_off AS (
  DELETE FROM penstock.deferrals d
   WHERE d.id = ANY (ARRAY(
     SELECT d.id
       FROM lane
      CROSS JOIN LATERAL (
        SELECT id, ordinals FROM penstock.deferrals WHERE batch_id = lane.batch_id LIMIT 1) AS d
      CROSS JOIN LATERAL (
        SELECT cancelled_at FROM penstock.session_requests
         WHERE lane_id = lane.id AND ordinal = lower(d.ordinals) LIMIT 1) AS r
      WHERE r.cancelled_at IS NOT NULL))
  RETURNING d.lane_id, lower(d.ordinals) AS ordinal, d.attempt
),
idle AS MATERIALIZED (
  SELECT lane.id, lane.next, put_off.ordinal, put_off.attempt
    FROM lane
    LEFT JOIN put_off ON put_off.lane_id = lane.id
   WHERE lane.busy = CASE WHEN put_off.ordinal IS NULL THEN 0 ELSE 1 END
),
place AS MATERIALIZED (
  SELECT idle.*, coalesce(alive.ordinal, last.ordinal + 1, idle.next) AS upto
    FROM idle
    LEFT JOIN LATERAL (
      SELECT ordinal FROM penstock.session_requests
       WHERE lane_id = idle.id AND ordinal >= idle.next AND cancelled_at IS NULL
       ORDER BY ordinal LIMIT 1) AS alive ON true
    LEFT JOIN LATERAL (
      SELECT ordinal FROM penstock.session_requests
       WHERE lane_id = idle.id AND ordinal >= idle.next
       ORDER BY ordinal DESC LIMIT 1) AS last ON true
),
gone AS MATERIALIZED (
  SELECT place.id AS lane_id, r.id, r.ordinal, r.cancelled_at, r.waited, 1 AS attempt
    FROM place
   CROSS JOIN LATERAL (
     SELECT id, ordinal, cancelled_at, waited FROM penstock.session_requests
      WHERE lane_id = place.id AND ordinal >= place.next AND ordinal < place.upto) AS r
  UNION ALL
  SELECT place.id, r.id, r.ordinal, r.cancelled_at, r.waited, place.attempt
    FROM place
   CROSS JOIN LATERAL (
     SELECT id, ordinal, cancelled_at, waited FROM penstock.session_requests
      WHERE lane_id = place.id AND ordinal = place.ordinal LIMIT 1) AS r
),
-- The custom id of a session's input is its request's public id.
written AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, line, state, attempts, lease_id, finished_at, custom_id, error_code, error_message)
  SELECT lane_id, ordinal, ordinal + 1, 'skipped', attempt, 0, cancelled_at, %(prefix)s || replace(id::text, '-', ''),
         'cancelled', 'It was cancelled before it was sent.'
    FROM gone
),
moved AS (
  UPDATE penstock.lanes l
     SET next = (SELECT upto FROM place WHERE place.id = l.id), busy = 0,
         (pool, route, endpoint) = (
           SELECT coalesce(max(r.pool), l.pool), coalesce(max(r.route), l.route), coalesce(max(r.endpoint), l.endpoint)
             FROM penstock.session_requests r
            WHERE r.lane_id = l.id AND r.ordinal = (SELECT upto FROM place WHERE place.id = l.id)),
         tag = extract(epoch FROM @now)
   WHERE l.id = ANY (ARRAY(SELECT lane_id FROM gone))
  RETURNING l.pool, l.runnable
)
SELECT (SELECT count(*) FROM gone)::int4, (SELECT count(pg_notify('penstock_work', pool)) FROM moved WHERE runnable),
       (SELECT count(pg_notify('penstock_answers', lane_id::text)) FROM gone WHERE waited)

-- name: find_recorded
-- Finds the items that have an outcome under the very lease they carry: this tells a settle that was applied, although
-- its answer was lost, from one that was fenced. GROUP BY the key keeps each a probe, also of tables that are spread
-- over nodes.
SELECT mine.n
  FROM unnest(%(nonces)b::int8[], %(lanes)b::int8[], %(ordinals)b::int4[])
       WITH ORDINALITY AS mine (nonce, lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT FROM penstock.outcomes
    WHERE lane_id = mine.lane_id AND ordinal = mine.ordinal AND lease_nonce = mine.nonce
    GROUP BY lane_id, ordinal) AS found

-- name: find_tried
-- Finds the items that have a failed attempt under the very lease they carry, for the same purpose.
SELECT mine.n
  FROM unnest(%(nonces)b::int8[], %(lanes)b::int8[], %(ordinals)b::int4[])
       WITH ORDINALITY AS mine (nonce, lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT FROM penstock.attempts
    WHERE lane_id = mine.lane_id AND ordinal = mine.ordinal AND lease_nonce = mine.nonce
    GROUP BY lane_id, ordinal) AS found

-- name: find_held_if_leased
-- Locks leases as the next statement does, and finds the items that they still hold.
WITH held AS MATERIALIZED (
  SELECT nonce, ordinals FROM penstock.leases
   WHERE id = ANY (%(leases)b::int8[]) AND worker_id IS NOT DISTINCT FROM %(worker)b::uuid
   ORDER BY id
     FOR UPDATE
)
SELECT mine.n - 1
  FROM unnest(%(nonces)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS mine (nonce, ordinal, n)
  JOIN held ON held.nonce = mine.nonce AND held.ordinals @> mine.ordinal

-- name: hold_columns
-- Lets nobody else record columns of a job's results until the commit, and no deletion of the job begin.
SELECT pg_advisory_xact_lock(hashtextextended('columns of ' || batch_id, 0))
  FROM penstock.jobs WHERE batch_id = %(batch_id)s
   FOR KEY SHARE

-- name: list_columns_if_there
-- Lists the columns of a job's results that are recorded, unless the job was deleted.
SELECT ARRAY(SELECT name FROM penstock.job_columns WHERE batch_id = %(batch_id)s)
  FROM penstock.batches WHERE id = %(batch_id)s AND (deleted_at IS NULL) IS TRUE

-- name: add_columns
-- Records result columns of a job, in this order; those that are there already keep their place.
INSERT INTO penstock.job_columns (batch_id, name)
SELECT %(batch_id)s, n.name
  FROM unnest(%(names)s::text[]) WITH ORDINALITY AS n (name, place)
 ORDER BY n.place
ON CONFLICT (batch_id, name) DO NOTHING
