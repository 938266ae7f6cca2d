-- Locks are taken in this order: session rows by owner and key, leases by id, lanes by id. Accepting and settling wait
-- for lanes; a claim waits for no lock.

-- name: accept_if_room
-- Appends requests to their sessions, many of each, in the order given; sessions that do not exist yet are created. One
-- statement, one commit: the lanes' row locks make the order of commit the order in each session.
-- The caller numbers the sessions (`s`) and says which of a few kinds (pool, route, endpoint) each request is of. Rows
-- find each other by these numbers in arrays: joins would depend on estimates, which are worth nothing here.
-- Where a kind names a worker, the first request of an idle session is claimed for it by the same commit, for as many
-- sessions as the worker has room for. It is the claim of an open lane, under the same lock.
-- Verdicts: accepted; existing, by its idempotency key; refused, for want of room; again, if another transaction has
-- created or deleted the session meanwhile, or has appended requests that this statement cannot see and that may have
-- the same idempotency key.
WITH wanted AS MATERIALIZED (
  SELECT w.*, k.*
    FROM unnest(%(s_owner)b::text[], %(s_key)b::text[], %(s_id)s::uuid[], %(s_keyed)b::bool[],
                %(s_on_dead_head)b::text[], %(s_max_queued)b::int4[], %(s_wait_timeout_s)s::float8[],
                %(s_priority)b::int4[])
         WITH ORDINALITY
         AS w (owner, key, new_id, keyed, on_dead_head, new_max_queued, new_wait_timeout_s, priority, s)
    LEFT JOIN LATERAL (
      SELECT s.id AS session_id, s.lane_id, s.max_queued, s.wait_timeout_s,
             (SELECT total FROM penstock.lanes WHERE id = s.lane_id) AS seen_total
        FROM penstock.sessions s
       WHERE s.place = ARRAY[w.owner, w.key]
      OFFSET 0) AS k ON true
),
made AS (
  INSERT INTO penstock.sessions
    (id, owner, key, lane_id, on_dead_head, max_queued, wait_timeout_s, priority, created_at)
  SELECT new_id, owner, key, nextval('penstock.lanes_id_seq'), on_dead_head, new_max_queued, new_wait_timeout_s,
         priority, @now
    FROM wanted
   WHERE session_id IS NULL
   ORDER BY owner, key
  ON CONFLICT (place) DO NOTHING
  RETURNING id, lane_id
),
makes AS MATERIALIZED (
  SELECT coalesce(array_agg(id ORDER BY id), '{}') AS ids, array_agg(lane_id ORDER BY id) AS lanes FROM made
),
-- Lanes are locked after the sessions, so that no transaction that waits for a session holds a lane.
held AS MATERIALIZED (
  SELECT l.id, l.next, l.total, l.busy, l.open, l.deadline, l.band
    FROM penstock.lanes l
   WHERE l.id = ANY (ARRAY(SELECT lane_id FROM wanted WHERE session_id IS NOT NULL))
     AND (SELECT ids FROM makes) IS NOT NULL
   ORDER BY l.id
     FOR UPDATE
),
holds AS MATERIALIZED (
  SELECT coalesce(array_agg(id ORDER BY id), '{}') AS ids, array_agg(next ORDER BY id) AS nexts,
         array_agg(total ORDER BY id) AS totals, array_agg(busy ORDER BY id) AS busies,
         array_agg(open ORDER BY id) AS opens, array_agg(band ORDER BY id) AS bands,
         -- A deleted session's lane is past its deadline.
         array_agg(deadline = 'infinity' ORDER BY id) AS alive
    FROM held
),
place AS MATERIALIZED (
  SELECT w.s, w.session_id IS NULL AS fresh, coalesce(w.session_id, w.new_id) AS session_id,
         coalesce(w.lane_id, makes.lanes[at.made]) AS lane_id,
         coalesce(w.max_queued, w.new_max_queued, %(max_queued)s::int4) AS max_queued,
         CASE WHEN w.session_id IS NULL THEN w.new_wait_timeout_s ELSE w.wait_timeout_s END AS wait_timeout_s,
         coalesce(holds.nexts[at.held], 0) AS next, coalesce(holds.totals[at.held], 0) AS total,
         coalesce(holds.busies[at.held], 0) AS busy, coalesce(holds.opens[at.held], true) AS open,
         CASE WHEN w.session_id IS NULL THEN coalesce(makes.ids[at.made] = w.new_id, false)
              ELSE coalesce(holds.ids[at.held] = w.lane_id AND holds.alive[at.held]
                            AND NOT (w.keyed AND holds.totals[at.held] <> w.seen_total), false) END AS ok,
         w.on_dead_head = 'block' AS blocks, w.priority, coalesce(holds.bands[at.held], -w.priority) AS band
    FROM wanted w
   CROSS JOIN makes
   CROSS JOIN holds
   CROSS JOIN LATERAL (
     SELECT width_bucket(w.new_id, makes.ids) AS made, width_bucket(w.lane_id, holds.ids) AS held) AS at
),
places AS MATERIALIZED (
  SELECT array_agg(session_id ORDER BY s) AS session_ids, array_agg(coalesce(lane_id, 0) ORDER BY s) AS lanes,
         array_agg(next ORDER BY s) AS nexts, array_agg(total ORDER BY s) AS totals,
         array_agg(busy ORDER BY s) AS busies, array_agg(open ORDER BY s) AS opens,
         array_agg(max_queued ORDER BY s) AS caps, array_agg(ok ORDER BY s) AS ok, array_agg(fresh ORDER BY s) AS fresh,
         array_agg(blocks ORDER BY s) AS blocks, array_agg(priority ORDER BY s) AS priorities,
         array_agg(coalesce(wait_timeout_s, 0) ORDER BY s) AS waits, array_agg(band ORDER BY s) AS bands
    FROM place
),
asked AS MATERIALIZED (
  SELECT r.n, r.s, r.kind, r.id, r.waited, p.session_ids[r.s] AS session_id, p.lanes[r.s] AS lane_id,
         p.nexts[r.s] AS next, p.totals[r.s] AS total, p.busies[r.s] AS busy, p.opens[r.s] AS open,
         p.caps[r.s] AS cap, p.ok[r.s] AS ok,
         p.fresh[r.s] AS fresh, nullif(p.waits[r.s], 0) AS wait_timeout_s, known.id AS existing
    FROM unnest(%(s)b::int4[], %(kind)b::int4[], %(id)s::uuid[], %(waited)b::bool[], %(idempotency_key)b::text[])
         WITH ORDINALITY AS r (s, kind, id, waited, idempotency_key, n)
   CROSS JOIN places p
    LEFT JOIN LATERAL (
      SELECT id FROM penstock.session_requests
       WHERE session_id = p.session_ids[r.s] AND idempotency_key = r.idempotency_key AND NOT p.fresh[r.s]
       LIMIT 1) AS known ON true
),
judged AS MATERIALIZED (
  SELECT asked.*, total + before AS ordinal,
         CASE WHEN NOT ok THEN 'again' WHEN existing IS NOT NULL THEN 'existing'
              WHEN total - next + before < cap THEN 'accepted'
              -- Cancelled requests take no room. They are counted only where that matters.
              WHEN total - next + before < cap + (
                     SELECT count(*) FROM penstock.session_requests r
                      WHERE r.lane_id = asked.lane_id AND r.ordinal >= asked.next AND r.cancelled_at IS NOT NULL)
              THEN 'accepted' ELSE 'refused' END AS verdict
    FROM (SELECT asked.*,
                 (count(*) FILTER (WHERE existing IS NULL) OVER (PARTITION BY s ORDER BY n)
                  - (existing IS NULL)::int4)::int4 AS before
            FROM asked) AS asked
),
stored AS (
  INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)
  SELECT -lane_id, 0, ordinal, ordinal + 1, (%(custom_id)b::text[])[n], (%(body)b::bytea[])[n]
    FROM judged
   WHERE verdict = 'accepted'
),
noted AS (
  INSERT INTO penstock.session_requests
    (lane_id, ordinal, id, session_id, owner, pool, route, endpoint, stream, waited, idempotency_key, fingerprint,
     accepted_at, announce)
  SELECT lane_id, ordinal, id, session_id, (%(s_owner)b::text[])[s], (%(k_pool)b::text[])[kind],
         (%(k_route)b::text[])[kind], (%(k_endpoint)b::text[])[kind], (%(stream)b::bool[])[n], waited,
         (%(idempotency_key)b::text[])[n], (%(fingerprint)b::bytea[])[n], @now,
         (%(announce)b::bool[])[n]
    FROM judged
   WHERE verdict = 'accepted'
),
begun AS MATERIALIZED (
  SELECT lane_id, session_id, ordinal, kind, s
    FROM (SELECT j.lane_id, j.session_id, j.ordinal, j.kind, j.s,
                 row_number() OVER (PARTITION BY (%(k_pool)b::text[])[j.kind] ORDER BY j.n) AS place
            FROM judged j
           WHERE j.verdict = 'accepted' AND j.ordinal = j.next AND j.busy = 0 AND j.open
             AND (%(k_worker)s::uuid[])[j.kind] IS NOT NULL
             AND NOT EXISTS (
               SELECT FROM penstock.gates g
                WHERE g.pool = (%(k_pool)b::text[])[j.kind] AND g.route = (%(k_route)b::text[])[j.kind]
                  AND (g.halted_at IS NOT NULL OR g.not_before > @now))) AS j
   WHERE place <= (%(k_room)b::int4[])[kind]
),
leased AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, owner, session, band, pool, route, limited, worker_id, ordinals, attempt, claimed_at,
     progressed_at)
  SELECT lane_id, session_id, (%(s_owner)b::text[])[s], true, places.bands[s], (%(k_pool)b::text[])[kind],
         (%(k_route)b::text[])[kind], true, (%(k_worker)s::uuid[])[kind],
         int4multirange(int4range(ordinal, ordinal + 1)), 1,
         @now, @now
    FROM begun, places
  RETURNING id, nonce, lane_id
),
begins AS MATERIALIZED (
  SELECT coalesce(array_agg(lane_id ORDER BY lane_id), '{}') AS lanes, array_agg(id ORDER BY lane_id) AS leases,
         array_agg(nonce ORDER BY lane_id) AS nonces
    FROM leased
),
-- The first request of an empty queue gives the lane its pool, route and endpoint.
grown AS MATERIALIZED (
  SELECT j.s, j.lane_id, j.fresh, j.next + j.begun AS next, j.busy + j.begun AS busy,
         (max(j.ordinal) + 1)::int4 AS total, coalesce(max(j.kind) FILTER (WHERE j.ordinal = j.next), 0) AS head,
         bool_or(j.ordinal = j.next AND j.busy = 0) AND j.begun = 0 AS ready
    FROM (SELECT judged.*,
                 (begins.lanes[width_bucket(lane_id, begins.lanes)] IS NOT DISTINCT FROM lane_id)::int4 AS begun
            FROM judged
           CROSS JOIN begins
           WHERE verdict = 'accepted') AS j
   GROUP BY j.s, j.lane_id, j.fresh, j.next, j.busy, j.begun
),
opened AS (
  INSERT INTO penstock.lanes
    (id, batch_id, session, pool, route, endpoint, source_id, source_lane, next, total, busy, width, priority, tag,
     blocks, owner, created_at)
  OVERRIDING SYSTEM VALUE
  SELECT g.lane_id, p.session_ids[g.s], true, (%(k_pool)b::text[])[g.head], (%(k_route)b::text[])[g.head],
         (%(k_endpoint)b::text[])[g.head], -g.lane_id, 0, g.next, g.total, g.busy, 1, p.priorities[g.s],
         extract(epoch FROM @now), p.blocks[g.s], (%(s_owner)b::text[])[g.s],
         @now
    FROM grown g
   CROSS JOIN places p
   WHERE g.fresh
),
grows AS MATERIALIZED (
  SELECT array_agg(lane_id ORDER BY lane_id) AS lanes, array_agg(total ORDER BY lane_id) AS totals,
         array_agg(next ORDER BY lane_id) AS nexts, array_agg(busy ORDER BY lane_id) AS busies,
         array_agg(head ORDER BY lane_id) AS heads, array_agg(ready ORDER BY lane_id) AS ready
    FROM grown
   WHERE NOT fresh
),
appended AS (
  UPDATE penstock.lanes l
     SET total = (SELECT totals FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))],
         next = (SELECT nexts FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))],
         busy = (SELECT busies FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))],
         pool = coalesce((%(k_pool)b::text[])[(SELECT heads FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))]],
                         l.pool),
         route = coalesce(
           (%(k_route)b::text[])[(SELECT heads FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))]], l.route),
         endpoint = coalesce(
           (%(k_endpoint)b::text[])[(SELECT heads FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))]],
           l.endpoint),
         tag = CASE WHEN (SELECT ready FROM grows)[width_bucket(l.id, (SELECT lanes FROM grows))]
                    THEN extract(epoch FROM @now) ELSE l.tag END
   WHERE l.id = ANY (ARRAY(SELECT lane_id FROM grown WHERE NOT fresh))
),
-- A caller waits now for a request that was accepted before without one.
awaited AS (
  UPDATE penstock.session_requests SET waited = true
   WHERE id = ANY (ARRAY(SELECT existing FROM judged WHERE existing IS NOT NULL AND waited)) AND NOT waited
),
-- Workers are notified of requests that they can begin at once.
notified AS MATERIALIZED (
  SELECT pg_notify('penstock_work', pool)
    FROM (SELECT DISTINCT (%(k_pool)b::text[])[head] AS pool FROM grown WHERE ready) AS ready
)
SELECT verdict, session_id, lane_id, ordinal, existing, wait_timeout_s,
       CASE WHEN verdict = 'accepted' AND ordinal = next
                 AND begins.lanes[width_bucket(lane_id, begins.lanes)] = lane_id
            THEN begins.leases[width_bucket(lane_id, begins.lanes)] END,
       begins.nonces[width_bucket(lane_id, begins.lanes)],
       @now, (SELECT count(*) FROM notified)
  FROM judged
 CROSS JOIN begins
 ORDER BY n

-- name: accept_one_if_idle
-- Appends a single request to an idle session that exists, and claims it at once, at half the cost of accept_if_room:
-- the case that callers wait for most. No row: the case is another, and nothing was changed.
WITH place AS MATERIALIZED (
  SELECT id, lane_id, wait_timeout_s FROM penstock.sessions WHERE place = ARRAY[%(owner)s::text, %(key)s]
),
lane AS (
  UPDATE penstock.lanes
     SET next = total + 1, total = total + 1, busy = 1, pool = %(pool)s, route = %(route)s, endpoint = %(endpoint)s,
         tag = CASE WHEN tag < extract(epoch FROM @now) - 60
                    THEN extract(epoch FROM @now) ELSE tag END
   WHERE id = (SELECT lane_id FROM place)
     AND (next = total AND busy = 0 AND open AND deadline = 'infinity') IS TRUE
     AND NOT EXISTS (
       SELECT FROM penstock.gates g
        WHERE g.pool = %(pool)s AND g.route = %(route)s
          AND (g.halted_at IS NOT NULL OR g.not_before > @now))
     AND (%(idempotency_key)s::text IS NULL OR NOT EXISTS (
       SELECT FROM penstock.session_requests
        WHERE session_id = (SELECT id FROM place) AND idempotency_key = %(idempotency_key)s::text))
  RETURNING id, batch_id, band, total - 1 AS ordinal
),
stored AS (
  INSERT INTO penstock.templates (source_id, source_lane, ordinal, line, custom_id, body)
  SELECT -id, 0, ordinal, ordinal + 1, %(custom_id)s, %(body)b::bytea FROM lane
),
noted AS (
  INSERT INTO penstock.session_requests
    (lane_id, ordinal, id, session_id, owner, pool, route, endpoint, stream, waited, idempotency_key, fingerprint,
     accepted_at, announce)
  SELECT id, ordinal, %(id)s::uuid, batch_id, %(owner)s, %(pool)s, %(route)s, %(endpoint)s, %(stream)s, %(waited)s,
         %(idempotency_key)s::text, %(fingerprint)b::bytea, @now, %(announce)s
    FROM lane
),
leased AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, owner, session, band, pool, route, limited, worker_id, ordinals, attempt, claimed_at,
     progressed_at)
  SELECT id, batch_id, %(owner)s, true, band, %(pool)s, %(route)s, true, %(worker)s::uuid,
         int4multirange(int4range(ordinal, ordinal + 1)), 1,
         @now, @now
    FROM lane
  RETURNING id, nonce
)
SELECT lane.batch_id, lane.id, lane.ordinal, place.wait_timeout_s, leased.id, leased.nonce, @now
  FROM lane, leased, place

-- name: find_stored
-- Finds which of some requests are stored, although the answer may have been lost.
SELECT r.id, r.session_id, r.lane_id, r.ordinal, s.wait_timeout_s, r.accepted_at
  FROM unnest(%(ids)s::uuid[]) AS mine (id)
 CROSS JOIN LATERAL (
   SELECT id, session_id, lane_id, ordinal, accepted_at FROM penstock.session_requests WHERE id = mine.id LIMIT 1) AS r
 CROSS JOIN LATERAL (SELECT wait_timeout_s FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s

-- name: find_known
-- Finds which of some requests have not been purged.
SELECT id FROM unnest(%(ids)s::uuid[]) AS mine (id)
 WHERE EXISTS (SELECT FROM penstock.session_requests r WHERE r.id = mine.id)

-- name: hold_lanes
-- Locks the lanes of some sessions: a caller that had to try again too often lets no other get ahead any more.
SELECT id FROM penstock.lanes
 WHERE id = ANY (ARRAY(
         SELECT k.lane_id
           FROM unnest(%(owners)s::text[], %(keys)s::text[]) AS w (owner, key)
          CROSS JOIN LATERAL (
            SELECT lane_id FROM penstock.sessions
             WHERE place = ARRAY[w.owner, w.key]
            OFFSET 0) AS k))
 ORDER BY id
   FOR UPDATE

-- name: find_requests
-- Reads some requests without their outcomes: whether each is being worked on, waits for another try, or was decided.
-- Outcomes of decided requests are read after this. A request in flight or waiting may be decided by then, and is shown
-- as it was here; a decided one stays so, unless it is deleted or run again in between: then it is looked for once
-- more. The other way round, a request could be answered between the two and be found nowhere.
-- Each part is one probe: a join might read the tables whole.
SELECT r.id, r.session_id, s.key, r.ordinal, r.endpoint, r.route, r.stream, r.accepted_at, r.cancelled_at,
       r.fingerprint, s.owner, s.deleted_at, r.lane_id, l.attempt, l.nonce, d.attempt,
       l.attempt IS NULL AND d.attempt IS NULL AND coalesce(
         r.ordinal < (SELECT next FROM penstock.lanes WHERE id = r.lane_id), false) AS decided
  FROM penstock.session_requests r
 CROSS JOIN LATERAL (
   SELECT owner, key, deleted_at FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s
  LEFT JOIN LATERAL (
   SELECT attempt, nonce FROM penstock.leases
    WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS l ON true
  LEFT JOIN LATERAL (
   SELECT attempt FROM penstock.deferrals WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS d ON true
 WHERE r.id = ANY (%(ids)s::uuid[])

-- name: find_requests_at
-- Reads requests of one session like find_requests, by their ordinals.
SELECT r.id, r.session_id, s.key, r.ordinal, r.endpoint, r.route, r.stream, r.accepted_at, r.cancelled_at,
       r.fingerprint, s.owner, s.deleted_at, r.lane_id, l.attempt, l.nonce, d.attempt,
       l.attempt IS NULL AND d.attempt IS NULL AND coalesce(
         r.ordinal < (SELECT next FROM penstock.lanes WHERE id = r.lane_id), false) AS decided
  FROM unnest(%(ordinals)s::int4[]) AS place (ordinal)
 CROSS JOIN LATERAL (
   SELECT * FROM penstock.session_requests WHERE lane_id = %(lane)s AND ordinal = place.ordinal LIMIT 1) AS r
 CROSS JOIN LATERAL (
   SELECT owner, key, deleted_at FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s
  LEFT JOIN LATERAL (
   SELECT attempt, nonce FROM penstock.leases
    WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS l ON true
  LEFT JOIN LATERAL (
   SELECT attempt FROM penstock.deferrals WHERE batch_id = r.session_id AND ordinals @> r.ordinal LIMIT 1) AS d ON true
 ORDER BY r.ordinal

-- name: read_decided
-- Reads the outcomes of some requests that were decided.
-- GROUP BY its key keeps each a probe: a join might read the table whole, and a LIMIT for each of many is what a table
-- that is spread over nodes cannot do.
SELECT w.n, o.state::text, o.status_code, o.response, o.error_code, o.error_message, o.attempts, o.finished_at,
       o.lease_nonce
  FROM unnest(%(lanes)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS w (lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT state, status_code, response, error_code, error_message, attempts, finished_at, lease_nonce
     FROM penstock.outcomes
    WHERE lane_id = w.lane_id AND ordinal = w.ordinal
    GROUP BY lane_id, ordinal) AS o

-- name: read_one_decided
-- Reads a single outcome, the most common case: at half the cost, and from the one node that has it.
SELECT 1, state::text, status_code, response, error_code, error_message, attempts, finished_at, lease_nonce
  FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND ordinal = %(ordinal)s

-- name: read_body
-- Reads what a single request asks.
SELECT body FROM penstock.templates
 WHERE source_id = %(source)s AND source_lane = 0 AND ordinal = %(ordinal)s

-- name: find_lane
-- Finds a session's lane, its cursor and its total.
SELECT l.id, l.next, l.total
  FROM penstock.sessions s
 CROSS JOIN LATERAL (SELECT id, next, total FROM penstock.lanes WHERE id = s.lane_id LIMIT 1) AS l
 WHERE s.place = ARRAY[%(owner)s::text, %(key)s]

-- name: list_undecided
-- Lists the ordinals of a session's next requests that may be pending, or being worked on: none is before the last that
-- the cursor has passed, which may be either, or neither. Ordinals are dense, so that they are counted out rather than
-- read in order, for which a planner that expects few rows would sort them all; here and below. With the step -1, the newest
-- come first.
SELECT every.ordinal
  FROM generate_series(%(first)s::int4, %(last)s::int4, %(step)s::int4) AS every (ordinal)
 CROSS JOIN LATERAL (
   SELECT FROM penstock.session_requests
    WHERE lane_id = %(lane)s AND ordinal = every.ordinal AND cancelled_at IS NULL
    LIMIT 1) AS live
 LIMIT %(limit)s

-- name: list_cancelled
-- Lists the ordinals of a session's next requests that were cancelled.
SELECT ordinal FROM penstock.session_requests
 WHERE lane_id = %(lane)s AND ordinal >= %(from)s AND ordinal < %(stop)s AND cancelled_at IS NOT NULL
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_cancelled_newest_first
-- Lists the ordinals of a session's newest requests that were cancelled.
SELECT ordinal FROM penstock.session_requests
 WHERE lane_id = %(lane)s AND ordinal >= %(from)s AND ordinal < %(stop)s AND cancelled_at IS NOT NULL
 ORDER BY ordinal DESC
 LIMIT %(limit)s

-- name: list_completed
-- Lists the ordinals of a session's next requests that were completed.
SELECT every.ordinal
  FROM generate_series(%(first)s::int4, %(last)s::int4, %(step)s::int4) AS every (ordinal)
 CROSS JOIN LATERAL (
   SELECT FROM penstock.outcomes
    WHERE lane_id = %(lane)s AND ordinal = every.ordinal AND state = 'completed'
    LIMIT 1) AS done
 LIMIT %(limit)s

-- name: list_failed
-- Lists the ordinals of a session's next requests that failed, from an index of their own.
SELECT ordinal FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND ordinal >= %(from)s AND ordinal < %(stop)s AND state <> 'completed'
   AND error_code IS DISTINCT FROM 'cancelled'
 ORDER BY ordinal
 LIMIT %(limit)s

-- name: list_failed_newest_first
-- Lists the ordinals of a session's newest requests that failed, from an index of their own.
SELECT ordinal FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND ordinal >= %(from)s AND ordinal < %(stop)s AND state <> 'completed'
   AND error_code IS DISTINCT FROM 'cancelled'
 ORDER BY ordinal DESC
 LIMIT %(limit)s

-- name: cancel_if_waiting
-- Cancels a request that is queued, or deferred for another try: when its turn comes it is passed over. A request that
-- is being worked on is not cancelled. The lane's lock keeps it from being claimed meanwhile; a deferral that is gone
-- was claimed.
WITH request AS MATERIALIZED (
  SELECT r.id, r.lane_id, r.ordinal, r.session_id
    FROM penstock.session_requests r
   CROSS JOIN LATERAL (
     SELECT owner, key, deleted_at FROM penstock.sessions WHERE id = r.session_id LIMIT 1) AS s
   WHERE r.id = %(id)s AND s.key = %(key)s AND s.deleted_at IS NULL
     AND (%(owner)s::text IS NULL OR s.owner = %(owner)s::text)
),
lane AS MATERIALIZED (
  SELECT id, next FROM penstock.lanes WHERE id = (SELECT lane_id FROM request) FOR UPDATE
),
due AS (
  UPDATE penstock.deferrals d SET due_at = least(due_at, @now)
   WHERE d.id = ANY (ARRAY(
           SELECT id FROM penstock.deferrals
            WHERE batch_id = (SELECT session_id FROM request) AND ordinals @> (SELECT ordinal FROM request)
              AND (SELECT id FROM lane) IS NOT NULL))
  RETURNING id
),
cancelled AS (
  UPDATE penstock.session_requests r SET cancelled_at = @now
   WHERE r.id = (SELECT id FROM request) AND r.cancelled_at IS NULL
     AND (r.ordinal >= (SELECT next FROM lane) OR EXISTS (SELECT FROM due))
  RETURNING r.lane_id, r.waited
)
SELECT count(pg_notify('penstock_answers', lane_id::text)) FROM cancelled
HAVING count(*) > 0

-- name: read_sessions
-- Reads one session by its key, or a page of an owner's sessions, newest first, with their figures.
SELECT s.id, s.owner, s.key, s.lane_id, s.on_dead_head, s.max_queued, s.wait_timeout_s, s.priority, s.created_at,
       l.total - l.next + l.busy - f.in_flight AS queued, f.in_flight, l.open, l.total, l.next - l.busy AS answered
  FROM penstock.sessions s
 CROSS JOIN LATERAL (
   SELECT next, total, busy, open FROM penstock.lanes WHERE id = s.lane_id LIMIT 1) AS l
 CROSS JOIN LATERAL (
   SELECT count(*)::int4 AS in_flight FROM penstock.leases WHERE batch_id = s.id) AS f
 WHERE s.id = ANY (ARRAY(
         (SELECT id FROM penstock.sessions
           WHERE %(key)s::text IS NOT NULL AND place = ARRAY[%(owner)s::text, %(key)s::text])
         UNION ALL
         (SELECT id FROM penstock.sessions
           WHERE %(key)s::text IS NULL AND owner = %(owner)s AND id < %(below)s AND deleted_at IS NULL
           ORDER BY id DESC
           LIMIT %(limit)s)))
 ORDER BY s.id DESC

-- name: make_session_if_new
-- Creates a session that has no requests yet.
WITH made AS (
  INSERT INTO penstock.sessions (id, owner, key, lane_id, created_at)
  VALUES (%(id)s, %(owner)s, %(key)s, nextval('penstock.lanes_id_seq'), @now)
  ON CONFLICT (place) DO NOTHING
  RETURNING id, lane_id
)
INSERT INTO penstock.lanes
  (id, batch_id, session, owner, created_at, pool, route, endpoint, source_id, source_lane, total, width, tag)
OVERRIDING SYSTEM VALUE
SELECT lane_id, id, true, %(owner)s, @now, '', '', '', -lane_id, 0, 0, 1, 0 FROM made

-- name: set_session
-- Replaces a session's settings.
WITH session AS (
  UPDATE penstock.sessions
     SET on_dead_head = %(on_dead_head)s, max_queued = %(max_queued)s, wait_timeout_s = %(wait_timeout_s)s,
         priority = %(priority)s
   WHERE place = ARRAY[%(owner)s::text, %(key)s]
  RETURNING lane_id
)
UPDATE penstock.lanes SET blocks = %(on_dead_head)s = 'block', priority = %(priority)s
 WHERE id = (SELECT lane_id FROM session)

-- name: hold_lane_if_blocked
-- Locks the lane of a session that is blocked: its head has failed for good.
SELECT id FROM penstock.lanes
 WHERE id = (SELECT lane_id FROM penstock.sessions
              WHERE place = ARRAY[%(owner)s::text, %(key)s])
   AND NOT open AND deadline = 'infinity'
   FOR UPDATE

-- name: find_head
-- Finds the last request of a session that was decided. Cancelled requests after it were passed over meanwhile.
SELECT ordinal FROM penstock.outcomes
 WHERE lane_id = %(lane)s AND NOT (state = 'skipped' AND error_code IS NOT DISTINCT FROM 'cancelled')
 ORDER BY ordinal DESC
 LIMIT 1

-- name: resume_if_held
-- Lets a blocked session go on, with its head once more if that is named and has failed. The lane is locked by this
-- transaction, and no request of it is in flight.
WITH dead AS (
  DELETE FROM penstock.outcomes
   WHERE lane_id = %(lane)s AND ordinal = %(head)s::int4 AND state IN ('failed', 'not_found')
  RETURNING ordinal, generation, attempts
),
deferred AS (
  INSERT INTO penstock.deferrals
    (lane_id, batch_id, owner, session, pool, route, limited, ordinals, attempt, generation, spent, reason, deferred_at,
     due_at)
  SELECT r.lane_id, r.session_id, r.owner, true, r.pool, r.route, true,
         int4multirange(int4range(r.ordinal, r.ordinal + 1)), 1, (SELECT generation + 1 FROM dead),
         (SELECT attempts FROM dead), 'reprocess', @now,
         @now
    FROM penstock.session_requests r
   WHERE r.lane_id = %(lane)s AND r.ordinal = (SELECT ordinal FROM dead)
)
UPDATE penstock.lanes
   SET open = true, tag = extract(epoch FROM @now),
       busy = busy + (SELECT count(*) FROM dead)::int4
 WHERE id = %(lane)s
RETURNING pg_notify('penstock_work', pool)
