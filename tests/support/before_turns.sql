-- What workers and servers of before 0009 said, word for word: they go on beside new ones until the post steps.

-- name: claim_open
-- Takes up to wants[i] ordinals of routes[i]: due deferrals first, then lanes by priority and deadline, sessions in the
-- order in which they became ready, batches by age.
-- Locks the lane, never the item: whoever pauses, cancels or deletes holds the same lock, so nothing is claimed
-- after their commit. SKIP LOCKED means a claim waits for nobody; one that finds nothing simply asks again.
WITH ask AS MATERIALIZED (
  SELECT a.route, a.want
    FROM unnest(%(routes)s::text[], %(wants)s::int4[]) AS a (route, want)
   WHERE NOT EXISTS (
     SELECT FROM penstock.gates g
      WHERE g.pool = %(pool)s AND g.route = a.route
        AND (g.halted_at IS NOT NULL OR g.not_before > coalesce(%(now)s::timestamptz, now())))
),
plain_due AS MATERIALIZED (
  SELECT d.*
    FROM ask
   CROSS JOIN LATERAL (
     SELECT d.id, d.lane_id, d.batch_id, d.route, d.limited, d.ordinals, d.size, d.attempt, d.reclaims, d.suspect,
            d.due_at, ask.want
       FROM penstock.deferrals d
      WHERE d.pool = %(pool)s AND d.route = ask.route AND NOT d.suspect AND NOT d.held
        AND d.due_at <= coalesce(%(now)s::timestamptz, now())
      ORDER BY d.due_at, d.id
      LIMIT ask.want
        FOR UPDATE SKIP LOCKED) AS d
),
-- What may kill its worker is taken alone, by a worker that holds no other suspect: who dies then, dies of this one.
suspect_due AS MATERIALIZED (
  SELECT d.*
    FROM ask
   CROSS JOIN LATERAL (
     SELECT d.id, d.lane_id, d.batch_id, d.route, d.limited, d.ordinals, d.size, d.attempt, d.reclaims, d.suspect,
            d.due_at, ask.want
       FROM penstock.deferrals d
      WHERE d.pool = %(pool)s AND d.route = ask.route AND d.suspect AND NOT d.held
        AND d.due_at <= coalesce(%(now)s::timestamptz, now())
      ORDER BY d.due_at, d.id
      LIMIT 1
        FOR UPDATE SKIP LOCKED) AS d
   WHERE %(suspect_ok)s::boolean
   ORDER BY d.due_at, d.id
   LIMIT 1
),
due AS MATERIALIZED (
  SELECT * FROM plain_due UNION ALL SELECT * FROM suspect_due
),
due_lane AS MATERIALIZED (
  SELECT l.id, l.endpoint, l.source_id, l.source_lane, l.session
    FROM penstock.lanes l
   WHERE l.id = ANY (ARRAY(SELECT DISTINCT lane_id FROM due))
     AND l.open AND l.deadline > coalesce(%(now)s::timestamptz, now())
   ORDER BY l.id
     FOR UPDATE SKIP LOCKED
),
-- IS TRUE keeps this a lookup in a hash table. As a join it depends on estimates, which are worth nothing here: a
-- thousand retries in a thousand lanes became a loop within a loop.
due_ranked AS (
  SELECT due.*, (sum(size) OVER (PARTITION BY route ORDER BY suspect DESC, due_at, id) - size)::int4 AS before
    FROM due
   WHERE (lane_id IN (SELECT id FROM due_lane)) IS TRUE
),
due_taken AS MATERIALIZED (
  SELECT id, lane_id, batch_id, route, limited, attempt, reclaims, suspect, ordinals,
         least(size, want - before) AS take,
         CASE WHEN size <= want - before THEN ordinals
              ELSE penstock.first_ordinals(ordinals, want - before) END AS taken
    FROM due_ranked
   WHERE before < want
),
due_gone AS (
  DELETE FROM penstock.deferrals
   WHERE id = ANY (ARRAY(SELECT id FROM due_taken WHERE taken = ordinals))
),
due_shrunk AS (
  UPDATE penstock.deferrals d
     SET ordinals = d.ordinals - t.taken
    FROM (SELECT id, taken FROM due_taken WHERE taken <> ordinals) AS t
   WHERE d.id = t.id
     AND d.id = ANY (ARRAY(SELECT id FROM due_taken WHERE taken <> ordinals))
),
ask_more AS MATERIALIZED (
  SELECT ask.route, ask.want - coalesce(sum(t.take), 0)::int4 AS want
    FROM ask LEFT JOIN due_taken t USING (route)
   GROUP BY ask.route, ask.want
),
-- How many lanes the rest will take, judged without locks: locking more than are used would hide them
-- from every other claim for as long as this one lasts.
ask_lanes AS MATERIALIZED (
  SELECT a.route, a.want, count(*)::int4 AS lanes
    FROM ask_more a
   CROSS JOIN LATERAL (
     SELECT sum(r.room) OVER (ORDER BY r.priority DESC, r.deadline, r.turn, r.id) - r.room AS before
       FROM (SELECT l.priority, l.deadline, l.turn, l.id,
                    least(l.total - l.next, coalesce(l.width - l.busy, l.total - l.next)) AS room
               FROM penstock.lanes l
              WHERE l.pool = %(pool)s AND l.route = a.route AND l.runnable
                AND l.deadline > coalesce(%(now)s::timestamptz, now())
              ORDER BY l.priority DESC, l.deadline, l.turn, l.id
              LIMIT a.want) AS r) AS seen
   WHERE a.want > 0 AND seen.before < a.want
   GROUP BY a.route, a.want
),
lane AS MATERIALIZED (
  SELECT l.*, a.want
    FROM ask_lanes a
   CROSS JOIN LATERAL (
     SELECT l.id, l.batch_id, l.route, l.endpoint, l.source_id, l.source_lane, l.next, l.total, l.width, l.busy,
            l.priority, l.deadline, l.turn, l.session
       FROM penstock.lanes l
      WHERE l.pool = %(pool)s AND l.route = a.route AND l.runnable
        AND l.deadline > coalesce(%(now)s::timestamptz, now())
      ORDER BY l.priority DESC, l.deadline, l.turn, l.id
      LIMIT a.lanes
        FOR UPDATE SKIP LOCKED) AS l
),
-- Near its end a lane is shared out in ever smaller pieces, so that workers finish together.
lane_room AS (
  SELECT lane.*,
         CASE WHEN width IS NULL THEN least(total - next, greatest(%(taper_floor)s::int4, (total - next) / 4))
              ELSE least(total - next, width - busy) END AS room
    FROM lane
),
lane_ranked AS (
  SELECT lane_room.*,
         (sum(room) OVER (PARTITION BY route ORDER BY priority DESC, deadline, turn, id) - room)::int4 AS before
    FROM lane_room
),
granted AS MATERIALIZED (
  SELECT id, batch_id, route, endpoint, source_id, source_lane, session, width IS NOT NULL AS limited, next, busy,
         least(room, want - before) AS take
    FROM lane_ranked
   WHERE before < want
),
-- The grants as arrays in the order of ids: width_bucket finds a lane's place by halving, so that the update needs no
-- join, whatever the planner believes about the table. They carry the values to store, not what to add: an update first
-- tries the row as its snapshot has it, and a settle that has made room since would make that try break lanes_width.
grants AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS lanes, array_agg(next + take ORDER BY id) AS nexts,
         array_agg(busy + CASE WHEN limited THEN take ELSE 0 END ORDER BY id) AS busies
    FROM granted
),
advanced AS (
  UPDATE penstock.lanes l
     SET next = (SELECT nexts FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))],
         busy = (SELECT busies FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))]
   WHERE l.id = ANY (ARRAY(SELECT id FROM granted))
),
leased AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt, reclaims, claimed_at, progressed_at)
  SELECT id, batch_id, %(pool)s, route, limited, %(worker)s::uuid,
         int4multirange(int4range(next, next + take)), 1, 0, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
    FROM granted
  UNION ALL
  SELECT lane_id, batch_id, %(pool)s, route, limited, %(worker)s::uuid,
         range_agg(taken), attempt, reclaims, coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
    FROM due_taken
   GROUP BY lane_id, batch_id, route, limited, attempt, reclaims, CASE WHEN suspect THEN id END
  RETURNING id, nonce, lane_id, batch_id, route, ordinals, attempt, reclaims
)
SELECT leased.id, leased.nonce, leased.lane_id, leased.batch_id, leased.route, place.endpoint, place.source_id,
       place.source_lane, leased.attempt, leased.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(leased.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(leased.ordinals) r) AS stops, place.session
  FROM leased
  JOIN (SELECT id, endpoint, source_id, source_lane, session FROM granted
        UNION
        SELECT id, endpoint, source_id, source_lane, session FROM due_lane) AS place ON place.id = leased.lane_id

-- name: settle_if_leased
-- Records what became of leased ordinals, in one statement: outcomes, deferrals, history, counters, the lease, and the
-- journal that followers of the batch read; and tells those who wait for a session's answers, once for all.
-- Only ordinals that a lease of this worker still holds are written; the others were fenced and change nothing.
-- Counters come from the rows written: an outcome that exists already would fail the statement. Leases are locked in
-- id order, so two settles cannot deadlock. A lease is known by its nonce: its id finds the row, and may have been given
-- out again after a restore.
-- Rows are addressed by id = ANY(...), which stays an index probe however many dead versions surround them, and what
-- belongs to them is found in arrays sorted by nonce (width_bucket halves its way there). Joins in its place depend on
-- estimates: for a thousand sessions they became loops within loops. The worker is compared in a way that no index
-- serves: the one over workers leads past everything this one ever held.
WITH held AS MATERIALIZED (
  SELECT id, nonce, lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims,
         ordinals - (%(gone)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])] AS remaining,
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
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.limited, h.attempt AS attempts, f.*
    FROM unnest(%(f_nonce)b::int8[], %(f_ordinal)b::int4[], %(f_state)b::text[], %(f_status)b::int4[],
                %(f_custom_id)b::text[], %(f_request_id)b::text[], %(f_error_code)b::text[],
                %(f_error_message)b::text[], %(f_response)b::bytea[])
         WITH ORDINALITY
         AS f (nonce, ordinal, state, status_code, custom_id, request_id, error_code, error_message, response, n)
    JOIN held h ON h.nonce = f.nonce AND h.ordinals @> f.ordinal
),
again AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.pool, h.route, h.limited, h.attempt, h.reclaims, a.*,
         coalesce(%(now)s::timestamptz, now()) + make_interval(secs => a.delay_s) AS due_at
    FROM unnest(%(a_nonce)b::int8[], %(a_ordinal)b::int4[], %(a_status)b::int4[], %(a_code)b::text[],
                %(a_message)b::text[], %(a_delay_s)b::float8[], %(a_counted)b::bool[], %(a_duration_ms)b::int4[])
         AS a (nonce, ordinal, status_code, code, message, delay_s, counted, duration_ms)
    JOIN held h ON h.nonce = a.nonce AND h.ordinals @> a.ordinal
),
back AS MATERIALIZED (
  SELECT h.id AS lease_id, h.lane_id, h.batch_id, h.pool, h.route, h.limited, h.attempt, h.reclaims,
         h.ordinals * b.ordinals AS ordinals
    FROM unnest(%(b_nonce)b::int8[], %(b_ordinals)s::int4multirange[]) AS b (nonce, ordinals)
    JOIN held h ON h.nonce = b.nonce AND h.ordinals && b.ordinals
),
written AS (
  INSERT INTO penstock.outcomes
    (lane_id, ordinal, line, state, status_code, attempts, lease_id, lease_nonce, finished_at, custom_id, request_id,
     error_code, error_message, response)
  SELECT lane_id, ordinal, (%(f_line)b::int4[])[n], state::penstock.outcome_state, status_code, attempts, lease_id,
         nonce, coalesce(%(now)s::timestamptz, now()), custom_id, request_id, error_code, error_message, response
    FROM final
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims, reason, due_at)
  SELECT lane_id, batch_id, pool, route, limited, int4multirange(int4range(ordinal, ordinal + 1)),
         attempt + counted::int4, reclaims, 'retry', due_at
    FROM again
  UNION ALL
  SELECT lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims, 'given_back',
         coalesce(%(now)s::timestamptz, now())
    FROM back
),
noted AS (
  INSERT INTO penstock.attempts
    (lane_id, ordinal, attempt, lease_id, lease_nonce, worker_id, ended_at, duration_ms, counted, status_code,
     error_code, error_message, not_before)
  SELECT lane_id, ordinal, attempt, lease_id, nonce, %(worker)b::uuid, coalesce(%(now)s::timestamptz, now()),
         duration_ms, counted, status_code, code, message, due_at
    FROM again
  UNION ALL
  SELECT lane_id, ordinal, attempts, lease_id, nonce, %(worker)b::uuid, coalesce(%(now)s::timestamptz, now()),
         (%(f_duration_ms)b::int4[])[n], true, status_code, coalesce(error_code, state), coalesce(error_message, ''), NULL
    FROM final
   -- What was cancelled before it was sent is no attempt.
   WHERE state <> 'completed' AND NOT (limited AND state = 'skipped' AND error_code IS NOT DISTINCT FROM 'cancelled')
),
shrunk AS (
  UPDATE penstock.leases
     SET ordinals = ordinals - (%(gone)s::int4multirange[])[width_bucket(nonce, %(nonces)b::int8[])],
         progressed_at = coalesce(%(now)s::timestamptz, now())
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
-- In id order, as whoever pauses or cancels takes them.
roomy AS MATERIALIZED (
  SELECT id FROM penstock.lanes
   WHERE id = ANY (ARRAY(SELECT lane_id FROM final WHERE limited))
   ORDER BY id
     FOR UPDATE
),
-- A session goes to the end of the line, and asks for what its next request asks for. One that cannot be seen from here
-- was accepted since: the queue was empty then, and whoever accepted it has set what it asks for.
-- `turn` is in an index. Where nothing waits it moves once a minute, for those who look which sessions are in use, and
-- the other updates touch no index.
freed AS (
  UPDATE penstock.lanes l
     SET busy = busy - (SELECT counts FROM room)[width_bucket(id, (SELECT lanes FROM room))],
         (pool, route, endpoint) = (
           SELECT coalesce(max(r.pool), l.pool), coalesce(max(r.route), l.route), coalesce(max(r.endpoint), l.endpoint)
             FROM penstock.session_requests r
            WHERE r.lane_id = l.id AND r.ordinal = l.next),
         turn = CASE WHEN session AND (next < total OR turn < coalesce(%(now)s::timestamptz, now()) - interval '1 minute')
                     THEN coalesce(%(now)s::timestamptz, now()) ELSE turn END,
         open = open AND NOT (blocks AND id = ANY (ARRAY(
           SELECT lane_id FROM final WHERE limited AND state IN ('failed', 'not_found'))))
   WHERE id = ANY (ARRAY(SELECT id FROM roomy))
  RETURNING l.runnable, CASE WHEN l.next < l.total AND EXISTS (
    SELECT FROM penstock.session_requests r
     WHERE r.lane_id = l.id AND r.ordinal = l.next AND r.cancelled_at IS NOT NULL) THEN l.batch_id END AS passes_over
),
-- Sessions have no figures to keep.
session AS MATERIALIZED (
  SELECT batch_id FROM penstock.lanes
   WHERE id = ANY (ARRAY(SELECT lane_id FROM held WHERE limited)) AND session
),
followed AS (
  INSERT INTO penstock.journal (batch_id, lane_id, completed, others, written_at)
  SELECT batch_id, lane_id, range_agg(completed), range_agg(others), coalesce(%(now)s::timestamptz, now())
    FROM held
   WHERE NOT limited AND NOT (isempty(completed) AND isempty(others))
   GROUP BY batch_id, lane_id
),
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
    FROM (SELECT batch_id, state AS what, n FROM final
          UNION ALL
          SELECT batch_id, 'retry', NULL FROM again) AS moved
   WHERE (batch_id IN (SELECT batch_id FROM session)) IS NOT TRUE
   GROUP BY batch_id
),
rung AS MATERIALIZED (
  SELECT pg_notify('penstock_answers', %(notify)s::text)
   WHERE %(notify)s::text IS NOT NULL AND EXISTS (SELECT FROM final WHERE limited)
)
SELECT (SELECT count(*) FROM final)::int4 AS outcomes,
       (SELECT count(*) FROM again)::int4 AS retries,
       (SELECT coalesce(sum(penstock.ordinal_count(ordinals)), 0) FROM back)::int4 AS given_back,
       EXISTS (SELECT FROM freed WHERE runnable) AS more,
       ARRAY(SELECT passes_over FROM freed WHERE passes_over IS NOT NULL) AS cancelled_next, coalesce(%(now)s::timestamptz, now()) AS at,
       (SELECT count(*) FROM rung) AS rung

-- name: create_batch_if_ready
-- Creates a batch over a sealed file: the batch and one lane per (url, model), whatever the number of lines.
-- IS TRUE, here and below, keeps everything else out of the choice of an index: the key alone finds the file, or the
-- batch, whatever the statistics say.
WITH source AS MATERIALIZED (
  SELECT id, source_id, lines FROM penstock.files
   WHERE id = %(file_id)s AND (owner = %(owner)s AND state = 'ready' AND deleted_at IS NULL) IS TRUE
     FOR KEY SHARE
),
batch AS (
  INSERT INTO penstock.batches
    (id, owner, file_id, pool, idempotency_key, target, metadata, priority, deadline, total, created_at, validated_at)
  SELECT %(id)s, %(owner)s, id, %(pool)s, %(key)s, %(target)s, %(metadata)s::jsonb, %(priority)s,
         coalesce(%(deadline)s::timestamptz, 'infinity'), lines, coalesce(%(now)s::timestamptz, now()),
         coalesce(%(now)s::timestamptz, now())
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

-- name: reclaim_if_lost
-- Takes leases back from workers that are silent past the grace, unregistered or known to be gone, and, when asked to
-- look for them, from workers that live but have not reported progress on a lease for too long. Judged here, on the
-- database's clock. Holders are found one probe each, so that what the living hold is not read; leases without progress
-- can only be found by reading all.
-- Deleting the lease is the fence. What it still held runs again at once; ordinals lost repeatedly are split, so that
-- the one that kills its workers ends up alone. Once that is lost too often, or if the policy is not to run anything
-- twice, the caller gets it on a lease of its own, to settle it as failed like any other.
WITH RECURSIVE
holder AS (
  (SELECT worker_id FROM penstock.leases ORDER BY worker_id LIMIT 1)
  UNION ALL
  SELECT (SELECT l.worker_id FROM penstock.leases l WHERE l.worker_id > h.worker_id ORDER BY l.worker_id LIMIT 1)
    FROM holder h WHERE h.worker_id IS NOT NULL
),
dead AS MATERIALIZED (
  SELECT worker_id FROM holder
   WHERE worker_id IS NOT NULL
     AND (worker_id IN (
            SELECT w.id FROM penstock.workers w
             WHERE w.heartbeat_at > coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(grace_s)s)
               AND w.id <> ALL (%(gone)s::uuid[]))) IS NOT TRUE
),
suspected AS MATERIALIZED (
  SELECT id FROM penstock.leases WHERE worker_id = ANY (ARRAY(SELECT worker_id FROM dead))
  UNION
  SELECT id FROM penstock.leases
   WHERE %(look_for_stuck)s::boolean
     AND progressed_at <= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(stuck_s)s)
),
-- Judged once more by the row as it is when it is locked: it may have made progress since.
lost AS MATERIALIZED (
  SELECT l.id, l.lane_id, l.batch_id, l.pool, l.route, l.limited, l.ordinals, l.size, l.attempt, l.reclaims,
         l.worker_id,
         %(action)s = 'fail' OR (l.size = 1 AND l.reclaims + 1 >= %(max_reclaims)s::int4) AS given_up
    FROM penstock.leases l
   WHERE l.id = ANY (ARRAY(SELECT id FROM suspected ORDER BY id LIMIT %(limit)s))
     AND ((l.worker_id IN (SELECT worker_id FROM dead)) IS TRUE
          OR l.progressed_at <= coalesce(%(now)s::timestamptz, now()) - make_interval(secs => %(stuck_s)s))
   ORDER BY l.id
     FOR UPDATE SKIP LOCKED
),
fenced AS (
  DELETE FROM penstock.leases WHERE id = ANY (ARRAY(SELECT id FROM lost))
),
noted AS (
  INSERT INTO penstock.reclaims
    (lane_id, lease_id, batch_id, worker_id, reclaimed_by, ordinals, attempt, reclaims, reclaimed_at)
  SELECT lane_id, id, batch_id, worker_id, %(worker)s::uuid, ordinals, attempt, reclaims + 1,
         coalesce(%(now)s::timestamptz, now())
    FROM lost
),
piece AS (
  SELECT lost.*, CASE WHEN reclaims > 0 AND size > 1 THEN penstock.first_ordinals(ordinals, size / 2)
                      ELSE ordinals END AS head
    FROM lost
   WHERE NOT given_up
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, pool, route, limited, ordinals, attempt, reclaims, reason, due_at)
  SELECT lane_id, batch_id, pool, route, limited, part, attempt, reclaims + 1, 'reclaimed',
         coalesce(%(now)s::timestamptz, now())
    FROM piece
   CROSS JOIN LATERAL (VALUES (head), (ordinals - head)) AS half (part)
   WHERE NOT isempty(part)
),
condemned AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, pool, route, limited, worker_id, ordinals, attempt, reclaims, claimed_at, progressed_at)
  SELECT lane_id, batch_id, pool, route, limited, %(worker)s::uuid, ordinals, attempt, reclaims + 1,
         coalesce(%(now)s::timestamptz, now()), coalesce(%(now)s::timestamptz, now())
    FROM lost
   WHERE given_up
  RETURNING id, nonce, lane_id, batch_id, route, ordinals, attempt, reclaims
)
SELECT (SELECT count(*) FROM lost)::int4 AS lost_leases,
       (SELECT coalesce(sum(size), 0) FROM lost)::int4 AS lost_ordinals,
       c.id, c.nonce, c.lane_id, c.batch_id, c.route, l.endpoint, l.source_id, l.source_lane, c.attempt, c.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(c.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(c.ordinals) r) AS stops, l.session
  FROM (VALUES (1)) AS always (one)
  LEFT JOIN condemned c ON true
  LEFT JOIN penstock.lanes l ON l.id = c.lane_id
