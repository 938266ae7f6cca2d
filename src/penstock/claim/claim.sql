-- Claims, bodies, workers, reclaims and gates.

-- name: claim_open
-- Leases up to wants[i] ordinals of routes[i], by turns: lanes, and deferrals that are due, stand in one line by band
-- (priority) and tag (virtual time, ADR 11). A claim is shared by several of one band; lanes of which the worker has enough are passed over. Each lane
-- that was served goes back in line behind its owner's last, as much farther as it was given work for its weight;
-- sessions keep their place. Suspects come first.
-- The line is looked at from a place on. Rows before it were served already: dead versions, which a snapshot held
-- elsewhere keeps. The answer says where the live rows begin, and when the next deferral that is not in line is due.
-- Locks the lane, never the item: a pause, cancel or delete takes the same lock, so nothing is claimed after its
-- commit. SKIP LOCKED means that a claim waits for no lock; a claim that finds nothing is simply made again.
WITH ask AS MATERIALIZED (
  SELECT a.route, a.want, a.from_band, a.from_tag
    FROM unnest(%(routes)s::text[], %(wants)s::int4[], %(from_bands)s::int2[], %(from_tags)s::float8[])
         AS a (route, want, from_band, from_tag)
   WHERE NOT EXISTS (
     SELECT FROM penstock.gates g
      WHERE g.pool = %(pool)s AND g.route = a.route
        AND (g.halted_at IS NOT NULL OR g.not_before > @now))
),
-- Rows are looked at without locks: to lock more than are used would hide them from every other claim for as long as
-- this one lasts.
met AS MATERIALIZED (
  SELECT ask.*, c.is_lane, c.band, c.tag, c.step, c.owner, c.rate, c.id, c.room, c.lane_id
    FROM ask
   CROSS JOIN LATERAL (
     (SELECT true AS is_lane, l.band, l.tag, l.step, l.owner, l.weight * l.nearness AS rate, l.id,
             least(l.total - l.next, coalesce(l.width - l.busy, l.total - l.next)) AS room, l.id AS lane_id
        FROM penstock.lanes l
       WHERE l.pool = %(pool)s AND l.route = ask.route AND l.runnable
         AND (l.band, l.tag) >= (ask.from_band, ask.from_tag)
         AND l.deadline > @now AND l.id <> ALL (%(full)s::int8[])
       ORDER BY l.band, l.tag, l.id
       LIMIT least(ask.want, %(look)s))
     UNION ALL
     (SELECT false, d.band, d.tag, d.step, d.owner, d.weight, d.id, d.size, d.lane_id
        FROM penstock.deferrals d
       WHERE d.pool = %(pool)s AND d.route = ask.route AND d.tag IS NOT NULL AND NOT d.held AND NOT d.suspect
         AND (d.band, d.tag) >= (ask.from_band, ask.from_tag)
       ORDER BY d.band, d.tag, d.id
       LIMIT least(ask.want, %(look)s))) AS c
),
-- Deferrals written while their lane was being closed have no turn.
seen AS MATERIALIZED (
  SELECT * FROM met
   WHERE is_lane OR (lane_id IN (
     SELECT id FROM penstock.lanes
      WHERE id = ANY (ARRAY(SELECT DISTINCT lane_id FROM met WHERE NOT is_lane))
        AND open AND deadline > @now)) IS TRUE
),
-- The tag being served now in each band, and the pieces in which the claim is shared out.
band AS MATERIALIZED (
  SELECT route, band, min(tag - step) AS at, ceil(max(want)::float8 / least(%(pieces)s, count(*)))::int4 AS piece,
         count(DISTINCT owner) = 1 AND count(*) FILTER (WHERE is_lane) <= 1 AND %(full)s::int8[] = '{}' AS alone,
         coalesce(sum(room) FILTER (WHERE NOT is_lane), 0)::int4 AS due
    FROM seen
   GROUP BY route, band
),
nearest AS (
  SELECT * FROM (
    SELECT s.*, b.piece,
           sum(CASE WHEN s.is_lane THEN least(s.room, b.piece) ELSE s.room END)
             OVER (PARTITION BY s.route ORDER BY s.band, s.tag, s.is_lane, s.id ROWS UNBOUNDED PRECEDING) AS upto
      FROM seen s
      JOIN band b ON b.route = s.route AND b.band = s.band) AS s
   WHERE upto - CASE WHEN is_lane THEN least(room, piece) ELSE room END < want
),
-- A lane's next piece comes as much later as its last was large for its weight: a lane of double weight gets two.
look AS MATERIALIZED (
  SELECT route, want, from_band, from_tag, is_lane, id, sum(least(size, want - before))::int4 AS take
    FROM (SELECT p.*, sum(size) OVER (
                   PARTITION BY route ORDER BY band, place, is_lane, id, n ROWS UNBOUNDED PRECEDING) - size AS before
            FROM (SELECT f.*, n.n, f.tag + (n.n - 1) * f.piece / f.rate AS place,
                         CASE WHEN f.is_lane THEN least(f.piece, f.room - (n.n - 1) * f.piece) ELSE f.room END AS size
                    FROM nearest f
                   CROSS JOIN LATERAL generate_series(
                     1, CASE WHEN f.is_lane THEN least(%(pieces)s, (f.room - 1) / f.piece + 1) ELSE 1 END) AS n (n)
                 ) AS p) AS p
   WHERE before < want
   GROUP BY route, want, from_band, from_tag, is_lane, id
),
looks AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS ids, array_agg(take ORDER BY id) AS takes FROM look WHERE is_lane
),
turn AS MATERIALIZED (
  SELECT route, want, from_band, from_tag, count(*)::int4 AS lanes
    FROM look
   WHERE is_lane
   GROUP BY route, want, from_band, from_tag
),
plain_due AS MATERIALIZED (
  SELECT d.id, d.lane_id, d.batch_id, d.owner, d.session, d.weight, d.route, d.limited, d.ordinals, d.size, d.attempt,
         d.reclaims, d.generation, d.spent, d.suspect, d.band, d.tag, (SELECT ask.want FROM ask WHERE ask.route = d.route) AS want
    FROM penstock.deferrals d
   WHERE d.id = ANY (ARRAY(SELECT id FROM look WHERE NOT is_lane)) AND NOT d.held AND NOT d.suspect
   ORDER BY d.id
     FOR UPDATE SKIP LOCKED
),
-- A suspect is claimed alone, by a worker that holds no other suspect: a worker that dies then was killed by this one.
suspect_due AS MATERIALIZED (
  SELECT d.*
    FROM ask
   CROSS JOIN LATERAL (
     SELECT d.id, d.lane_id, d.batch_id, d.owner, d.session, d.weight, d.route, d.limited, d.ordinals, d.size, d.attempt,
            d.reclaims, d.generation, d.spent, d.suspect, d.band, d.tag, d.due_at, ask.want
       FROM penstock.deferrals d
      WHERE d.pool = %(pool)s AND d.route = ask.route AND d.suspect AND NOT d.held
        AND d.due_at <= @now
      ORDER BY d.due_at, d.id
      LIMIT 1
        FOR UPDATE SKIP LOCKED) AS d
   WHERE %(suspect_ok)s::boolean
   ORDER BY d.due_at, d.id
   LIMIT 1
),
due AS MATERIALIZED (
  SELECT * FROM plain_due
  UNION ALL
  SELECT id, lane_id, batch_id, owner, session, weight, route, limited, ordinals, size, attempt, reclaims, generation,
         spent, suspect, band, tag, want
    FROM suspect_due
),
due_lane AS MATERIALIZED (
  SELECT l.id, l.endpoint, l.source_id, l.source_lane
    FROM penstock.lanes l
   WHERE l.id = ANY (ARRAY(SELECT DISTINCT lane_id FROM due))
     AND l.open AND l.deadline > @now
   ORDER BY l.id
     FOR UPDATE SKIP LOCKED
),
lane AS MATERIALIZED (
  SELECT l.*, turn.want
    FROM turn
   CROSS JOIN LATERAL (
     SELECT l.id, l.batch_id, l.owner, l.session, l.weight, l.nearness, l.route, l.endpoint, l.source_id, l.source_lane,
            l.next, l.total, l.width, l.busy, l.band, l.tag, l.step
       FROM penstock.lanes l
      WHERE l.pool = %(pool)s AND l.route = turn.route AND l.runnable
        AND (l.band, l.tag) >= (turn.from_band, turn.from_tag)
        AND l.deadline > @now AND l.id <> ALL (%(full)s::int8[])
      ORDER BY l.band, l.tag, l.id
      LIMIT turn.lanes
        FOR UPDATE SKIP LOCKED) AS l
),
-- Near its end a lane that is alone in line is shared out in ever smaller pieces, so that workers finish together.
-- Where others stand in line, there is work for all, and a lane with little left should not need many more claims.
-- Of a job that lets so many rows be in flight, what it lets is shared out in the same way.
-- IS TRUE keeps the look for a deferral's lane a lookup in a hash table. As a join it depends on estimates, which are
-- worth nothing here: a thousand retries in a thousand lanes became a loop within a loop.
candidate AS (
  SELECT true AS is_lane, id, id AS lane_id, route, want, false AS suspect, band, tag,
         CASE WHEN NOT session
              THEN least(total - next, width - busy,
                         CASE WHEN (SELECT b.alone FROM band b WHERE b.route = lane.route AND b.band = lane.band)
                              THEN greatest(%(taper_floor)s::int4, least(total - next, width - busy) / 4) END,
                         CASE WHEN id = looks.ids[width_bucket(id, looks.ids)]
                              THEN looks.takes[width_bucket(id, looks.ids)]
                              ELSE (SELECT b.piece FROM band b WHERE b.route = lane.route AND b.band = lane.band) END)
              ELSE least(total - next, width - busy) END AS room,
         NULL::int4multirange AS ordinals
    FROM lane, looks
  UNION ALL
  SELECT false, id, lane_id, route, want, suspect, band, tag, size, ordinals
    FROM due
   WHERE (lane_id IN (SELECT id FROM due_lane)) IS TRUE
),
served AS MATERIALIZED (
  SELECT is_lane, id, ordinals, room, least(room, want - before) AS take
    FROM (SELECT candidate.*,
                 (sum(room) OVER (PARTITION BY route ORDER BY suspect DESC, band, tag, is_lane, id) - room)::int4 AS before
            FROM candidate) AS ranked
   WHERE before < want
),
-- Ordinals for each row, as arrays in the order of ids: width_bucket finds a row's place by halving, so that nothing
-- below needs a join, whatever the planner believes about the tables.
lane_takes AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS ids, array_agg(take ORDER BY id) AS takes FROM served WHERE is_lane
),
due_takes AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS ids,
         array_agg(CASE WHEN take = room THEN ordinals ELSE penstock.first_ordinals(ordinals, take) END
                   ORDER BY id) AS taken
    FROM served
   WHERE NOT is_lane
),
due_taken AS MATERIALIZED (
  SELECT due.*, due_takes.taken[width_bucket(id, due_takes.ids)] AS taken
    FROM due, due_takes
   WHERE id = due_takes.ids[width_bucket(id, due_takes.ids)]
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
-- A lane that is alone moves on with every sixteenth claim or so, and with it the place from which the line is looked at.
granted AS MATERIALIZED (
  SELECT lane.*, take, least(take, total - next - take) / (weight * nearness) AS next_step,
         NOT session AND next + take < total
           AND ((next + take) / (16 * take) <> next / (16 * take)
                OR NOT coalesce((SELECT b.alone FROM band b WHERE b.route = lane.route AND b.band = lane.band), false))
           AS returns
    FROM lane, lane_takes
   CROSS JOIN LATERAL (SELECT lane_takes.takes[width_bucket(lane.id, lane_takes.ids)] AS take) AS its
   WHERE lane.id = lane_takes.ids[width_bucket(lane.id, lane_takes.ids)]
),
owner AS MATERIALIZED (
  SELECT o.route, o.band, o.owner, greatest(
           o.at,
           (SELECT l.tag FROM penstock.lanes l
             WHERE ARRAY[l.pool, l.route, l.band::text, l.owner] = ARRAY[%(pool)s, o.route, o.band::text, o.owner]
               AND l.runnable AND NOT l.session AND l.tag IS NOT NULL
             ORDER BY l.tag DESC LIMIT 1),
           (SELECT d.tag FROM penstock.deferrals d
             WHERE ARRAY[d.pool, d.route, d.band::text, d.owner] = ARRAY[%(pool)s, o.route, o.band::text, o.owner]
               AND d.tag IS NOT NULL AND NOT d.held AND NOT d.suspect AND NOT d.session AND d.tag > o.at
             ORDER BY d.tag DESC LIMIT 1)) AS last
    FROM (SELECT DISTINCT g.route, g.band, g.owner, coalesce(b.at, 0) AS at
            FROM granted g
            LEFT JOIN band b ON b.route = g.route AND b.band = g.band
           WHERE g.returns) AS o
),
-- The values to store, not what to add: an update first tries the row as its snapshot has it, and a settle that has made
-- room since would make that try break lanes_width.
grants AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS lanes, array_agg(next + take ORDER BY id) AS nexts,
         array_agg(busy + CASE WHEN width IS NULL THEN 0 ELSE take END ORDER BY id) AS busies,
         array_agg(CASE WHEN returns THEN last + behind ELSE tag END ORDER BY id) AS tags,
         array_agg(CASE WHEN returns THEN next_step ELSE step END ORDER BY id) AS steps
    FROM (SELECT g.*, o.last,
                 sum(g.next_step) FILTER (WHERE returns) OVER (PARTITION BY g.route, g.band, g.owner ORDER BY g.tag, g.id)
                   AS behind
            FROM granted g
            LEFT JOIN owner o ON o.route = g.route AND o.band = g.band AND o.owner = g.owner) AS charged
),
advanced AS (
  UPDATE penstock.lanes l
     SET next = (SELECT nexts FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))],
         busy = (SELECT busies FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))],
         tag = (SELECT tags FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))],
         step = (SELECT steps FROM grants)[width_bucket(l.id, (SELECT lanes FROM grants))]
   WHERE l.id = ANY (ARRAY(SELECT id FROM granted))
),
leased AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, owner, session, band, weight, pool, route, limited, worker_id, ordinals, attempt, reclaims,
     generation, spent, claimed_at, progressed_at)
  SELECT id, batch_id, owner, session, band, weight * nearness, %(pool)s, route, width IS NOT NULL, %(worker)s::uuid,
         int4multirange(int4range(next, next + take)), 1, 0, 0, 0, @now,
         @now
    FROM granted
  UNION ALL
  SELECT lane_id, batch_id, owner, session, band, weight, %(pool)s, route, limited, %(worker)s::uuid,
         range_agg(taken), attempt, reclaims, generation, spent, @now,
         @now
    FROM due_taken
   GROUP BY lane_id, batch_id, owner, session, band, weight, route, limited, attempt, reclaims, generation, spent,
            CASE WHEN suspect THEN id END
  RETURNING id, nonce, lane_id, batch_id, route, session, ordinals, attempt, reclaims, generation, spent
)
SELECT @now AS at,
       (SELECT min(d.due_at)
          FROM ask
         CROSS JOIN LATERAL (
           SELECT due_at FROM penstock.deferrals
            WHERE pool = %(pool)s AND route = ask.route AND tag IS NULL AND NOT held AND NOT suspect
              AND due_at >= %(due_from)s::timestamptz
            ORDER BY due_at LIMIT 1) AS d) AS next_due_at,
       line.routes, line.bands, line.tags, line.alone, line.due,
       leased.id, leased.nonce, leased.lane_id, leased.batch_id, leased.route, place.endpoint, place.source_id,
       place.source_lane, leased.attempt, leased.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(leased.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(leased.ordinals) r) AS stops, leased.session, leased.generation, leased.spent
  FROM (SELECT array_agg(route ORDER BY route, band) AS routes, array_agg(band ORDER BY route, band) AS bands,
               array_agg(at ORDER BY route, band) AS tags, array_agg(alone ORDER BY route, band) AS alone,
               array_agg(due ORDER BY route, band) AS due
          FROM band) AS line
  LEFT JOIN leased ON true
  LEFT JOIN (SELECT id, endpoint, source_id, source_lane FROM granted
             UNION
             SELECT id, endpoint, source_id, source_lane FROM due_lane) AS place ON place.id = leased.lane_id

-- name: line_up_due
-- Gives deferrals that are due a place in line, until so many ordinals of a route have one. An owner's retries go before
-- its unbegun inputs, behind its other retries, each charged what it holds; at the head of the line where no other owner
-- is in it. Deferrals of sessions are placed by their time.
WITH ask AS MATERIALIZED (
  SELECT a.route, a.from_band, a.from_tag, a.alone
    FROM unnest(%(routes)s::text[], %(from_bands)s::int2[], %(from_tags)s::float8[], %(alone)s::bool[])
         AS a (route, from_band, from_tag, alone)
),
found AS MATERIALIZED (
  SELECT d.*, CASE WHEN d.band = ask.from_band THEN ask.from_tag ELSE '-infinity' END AS from_tag,
         ask.alone AND d.band = ask.from_band AS alone
    FROM ask
   CROSS JOIN LATERAL (
     SELECT d.id, d.route, d.band, d.owner, d.session, d.due_at, d.size,
            CASE WHEN d.session THEN 0 ELSE d.size / d.weight END AS step
       FROM penstock.deferrals d
      WHERE d.pool = %(pool)s AND d.route = ask.route AND d.tag IS NULL AND NOT d.held AND NOT d.suspect
        AND d.due_at >= %(due_from)s::timestamptz AND d.due_at <= @now
      ORDER BY d.due_at, d.id
      LIMIT %(limit)s
        FOR UPDATE SKIP LOCKED) AS d
),
due AS MATERIALIZED (
  SELECT * FROM (
    SELECT found.*, sum(size) OVER (PARTITION BY route ORDER BY due_at, id) - size AS before FROM found) AS d
   WHERE before < %(limit)s
),
owner AS MATERIALIZED (
  SELECT o.route, o.band, o.owner, o.start, greatest(
           o.start,
           (SELECT e.tag FROM penstock.deferrals e
             WHERE ARRAY[e.pool, e.route, e.band::text, e.owner] = ARRAY[%(pool)s, o.route, o.band::text, o.owner]
               AND e.tag IS NOT NULL AND NOT e.held AND NOT e.suspect AND NOT e.session AND e.tag > o.start
             ORDER BY e.tag DESC LIMIT 1)) AS last
    FROM (SELECT DISTINCT route, band, owner, penstock.line_start(%(pool)s, route, band, from_tag) AS start
            FROM due WHERE NOT session) AS o
),
places AS MATERIALIZED (
  SELECT array_agg(id ORDER BY id) AS ids, array_agg(CASE WHEN alone THEN 0 ELSE step END ORDER BY id) AS steps,
         -- The tag of a deferral that is alone in line grows with the clock, by a billionth of a second's worth: dead rows of
         -- deferrals that were served before it then lie behind the place at which the next claim begins to look.
         array_agg(CASE WHEN session THEN extract(epoch FROM due_at)
                        WHEN alone THEN start + (extract(epoch FROM @now) - 1.79e9) * 1e-9
                        ELSE last + behind END
                   ORDER BY id) AS tags
    FROM (SELECT d.*, o.start, o.last,
                 sum(d.step) OVER (PARTITION BY d.route, d.band, d.owner ORDER BY d.due_at, d.id) AS behind
            FROM due d
            LEFT JOIN owner o ON o.route = d.route AND o.band = d.band AND o.owner = d.owner) AS placed
)
UPDATE penstock.deferrals d
   SET tag = (SELECT tags FROM places)[width_bucket(d.id, (SELECT ids FROM places))],
       step = (SELECT steps FROM places)[width_bucket(d.id, (SELECT ids FROM places))]
 WHERE d.id = ANY (ARRAY(SELECT id FROM due))

-- name: read_range
-- Reads the bodies of one ordinal range, at least one and no more than a byte budget. `is_leased`, asked after this one,
-- says whether they may be used.
SELECT t.ordinal, t.line, t.custom_id, t.body
  FROM (SELECT ordinal, line, custom_id, body,
               sum(octet_length(body)) OVER (ORDER BY ordinal) - octet_length(body) AS before
          FROM penstock.templates
         WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s
           AND ordinal >= %(start)s AND ordinal < %(stop)s
         ORDER BY ordinal
         LIMIT %(rows)s) AS t
 WHERE t.before < %(bytes)s
 ORDER BY t.ordinal

-- name: read_some
-- Reads the bodies of scattered ordinals (retries), under the same bounds.
-- The inner LIMIT makes it one probe per ordinal. With ordinal = ANY(...), servers before 17 walk the whole lane to
-- have its rows in order.
SELECT t.ordinal, t.line, t.custom_id, t.body
  FROM (SELECT t.ordinal, t.line, t.custom_id, t.body,
               sum(octet_length(t.body)) OVER (ORDER BY t.ordinal) - octet_length(t.body) AS before
          FROM unnest(%(ordinals)s::int4[]) AS wanted (ordinal)
         CROSS JOIN LATERAL (
           SELECT ordinal, line, custom_id, body
             FROM penstock.templates
            WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal = wanted.ordinal
            LIMIT 1) AS t
         ORDER BY t.ordinal
         LIMIT %(rows)s) AS t
 WHERE t.before < %(bytes)s
 ORDER BY t.ordinal

-- name: is_leased
-- Tells whether a lease is still held and, where that matters, its lane open. Asked after the bodies were read: a lease
-- that is there now was there then, since one that is gone never comes back, and nothing is deleted under a lease. So
-- the bodies read were whole. Asked before, the lease could end and the inputs be deleted between the two.
SELECT EXISTS (SELECT FROM penstock.leases WHERE id = %(lease)s AND nonce = %(nonce)s)
   AND (%(closed_too)s::boolean OR EXISTS (SELECT FROM penstock.lanes WHERE id = %(lane_id)s AND open))

-- name: read_heads
-- Reads the bodies of sessions' next requests, many sessions at once, at least one and no more than a byte budget.
-- `find_heads_if_leased`, asked after this one, says which of them may be used.
-- GROUP BY its key keeps each a probe: a join might read the table whole, and a LIMIT for each of many is what a table
-- that is spread over nodes cannot do.
SELECT t.n, t.line, t.custom_id, t.body
  FROM (SELECT mine.n, t.line, t.custom_id, t.body,
               sum(octet_length(t.body)) OVER (ORDER BY mine.n) - octet_length(t.body) AS before
          FROM unnest(%(sources)b::int8[], %(ordinals)b::int4[]) WITH ORDINALITY AS mine (source_id, ordinal, n)
         CROSS JOIN LATERAL (
           SELECT line, custom_id, body FROM penstock.templates
            WHERE source_id = mine.source_id AND source_lane = 0 AND ordinal = mine.ordinal
            GROUP BY source_id, source_lane, ordinal) AS t) AS t
 WHERE t.before < %(bytes)s
 ORDER BY t.n

-- name: find_heads_if_leased
-- Reads sessions' next requests, without those whose lease is gone or, where that matters, whose lane was closed. Asked
-- after their bodies were read, as `is_leased` is. The lane's own endpoint is that of the request after: each request
-- has its own.
SELECT mine.n, r.id, r.endpoint, r.stream, r.waited, r.cancelled_at IS NOT NULL AS cancelled
  FROM unnest(%(leases)b::int8[], %(nonces)b::int8[], %(lanes)b::int8[], %(ordinals)b::int4[])
       WITH ORDINALITY AS mine (lease_id, nonce, lane_id, ordinal, n)
 CROSS JOIN LATERAL (
   SELECT FROM penstock.leases WHERE id = mine.lease_id AND nonce = mine.nonce LIMIT 1) AS held
 CROSS JOIN LATERAL (
   SELECT id, endpoint, stream, waited, cancelled_at FROM penstock.session_requests
    WHERE lane_id = mine.lane_id AND ordinal = mine.ordinal
    LIMIT 1) AS r
 CROSS JOIN LATERAL (
   SELECT FROM penstock.lanes WHERE id = mine.lane_id AND (open OR %(closed_too)s::boolean) LIMIT 1) AS l

-- name: closed_lanes
-- Finds which of some lanes are closed now, or deleted with their batch.
SELECT id FROM unnest(%(lanes)s::int8[]) AS mine (id)
EXCEPT
SELECT id FROM penstock.lanes WHERE id = ANY (%(lanes)s::int8[]) AND open

-- name: routes_with_work
-- Lists the routes of a pool that have anything to claim now or later, one index probe per route.
WITH RECURSIVE
lane_route AS (
  (SELECT route FROM penstock.lanes WHERE pool = %(pool)s AND runnable ORDER BY route LIMIT 1)
  UNION ALL
  SELECT (SELECT l.route FROM penstock.lanes l
           WHERE l.pool = %(pool)s AND l.runnable AND l.route > r.route ORDER BY l.route LIMIT 1)
    FROM lane_route r WHERE r.route IS NOT NULL
),
deferred_route AS (
  (SELECT route FROM penstock.deferrals WHERE pool = %(pool)s AND NOT held ORDER BY route LIMIT 1)
  UNION ALL
  SELECT (SELECT d.route FROM penstock.deferrals d
           WHERE d.pool = %(pool)s AND NOT d.held AND d.route > r.route ORDER BY d.route LIMIT 1)
    FROM deferred_route r WHERE r.route IS NOT NULL
)
SELECT route FROM lane_route WHERE route IS NOT NULL
UNION
SELECT route FROM deferred_route WHERE route IS NOT NULL

-- name: reclaimed_routes
-- Lists the routes that have items reclaimed from lost workers and not claimed since, unless their gate is closed.
-- Suspects do not count: they are claimed one at a time, however long it takes.
WITH RECURSIVE reclaimed AS (
  (SELECT route FROM penstock.deferrals
    WHERE pool = %(pool)s AND reason = 'reclaimed' AND NOT suspect AND NOT held ORDER BY route LIMIT 1)
  UNION ALL
  SELECT (SELECT d.route FROM penstock.deferrals d
           WHERE d.pool = %(pool)s AND d.reason = 'reclaimed' AND NOT d.suspect AND NOT d.held AND d.route > r.route
           ORDER BY d.route LIMIT 1)
    FROM reclaimed r WHERE r.route IS NOT NULL
)
SELECT r.route FROM reclaimed r
 WHERE r.route IS NOT NULL
   AND NOT EXISTS (
     SELECT FROM penstock.gates g
      WHERE g.pool = %(pool)s AND g.route = r.route
        AND (g.halted_at IS NOT NULL OR g.not_before > @now))

-- name: register_worker
-- Registers a worker before its first claim.
INSERT INTO penstock.workers (id, pool, host, machine, pid, pid_birth, started_at, heartbeat_at)
VALUES (%(id)s, %(pool)s, %(host)s, %(machine)s, %(pid)s, %(pid_birth)s, @now, @now)

-- name: remove_worker
-- Removes a worker that stopped cleanly.
DELETE FROM penstock.workers WHERE id = %(id)s

-- name: list_workers
-- Lists the workers registered from one machine, to find those whose process has exited.
SELECT id, pid, pid_birth FROM penstock.workers WHERE machine = %(machine)s

-- name: reclaim_if_lost
-- Takes leases back from workers that are silent past the grace, unregistered or known to be gone, and, when asked to
-- look for them, from workers that live but have not reported progress on a lease for too long. Judged here, on the
-- database's clock. Holders are found one probe each, so that leases of live workers are not read; leases without
-- progress can only be found by reading all.
-- Deleting the lease is the fence. Its remaining ordinals run again at once, at the head of the line; ordinals lost
-- repeatedly are split, so that the one that kills its workers ends up alone. Once that is lost too often, or if the
-- policy is not to run anything twice, the caller gets it on a lease of its own, to settle it as failed like any other.
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
             WHERE w.heartbeat_at > @now - make_interval(secs => %(grace_s)s)
               AND w.id <> ALL (%(gone)s::uuid[]))) IS NOT TRUE
),
suspected AS MATERIALIZED (
  SELECT id FROM penstock.leases WHERE worker_id = ANY (ARRAY(SELECT worker_id FROM dead))
  UNION
  SELECT id FROM penstock.leases
   WHERE %(look_for_stuck)s::boolean
     AND progressed_at <= @now - make_interval(secs => %(stuck_s)s)
),
-- Leases are judged once more by the row as it is when locked: it may have made progress since.
lost AS MATERIALIZED (
  SELECT l.id, l.lane_id, l.batch_id, l.owner, l.session, l.band, l.weight, l.pool, l.route, l.limited, l.ordinals, l.size,
         l.attempt, l.reclaims, l.generation, l.spent, l.worker_id,
         %(action)s = 'fail' OR (l.size = 1 AND l.reclaims + 1 >= %(max_reclaims)s::int4) AS given_up
    FROM penstock.leases l
   WHERE l.id = ANY (ARRAY(SELECT id FROM suspected ORDER BY id LIMIT %(limit)s))
     AND ((l.worker_id IN (SELECT worker_id FROM dead)) IS TRUE
          OR l.progressed_at <= @now - make_interval(secs => %(stuck_s)s))
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
         @now
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
    (lane_id, batch_id, owner, session, band, weight, pool, route, limited, ordinals, attempt, reclaims, generation,
     spent, reason, deferred_at, due_at, tag, held)
  SELECT lane_id, batch_id, owner, session, band, weight, pool, route, limited, part, attempt, reclaims + 1, generation,
         spent, 'reclaimed', @now, @now,
         CASE WHEN session THEN extract(epoch FROM @now)
              ELSE penstock.line_start(pool, route, band, '-infinity') END,
         coalesce((SELECT NOT (l.open OR l.session) FROM penstock.lanes l WHERE l.id = lane_id), false)
    FROM piece
   CROSS JOIN LATERAL (VALUES (head), (ordinals - head)) AS half (part)
   WHERE NOT isempty(part)
),
condemned AS (
  INSERT INTO penstock.leases
    (lane_id, batch_id, owner, session, band, weight, pool, route, limited, worker_id, ordinals, attempt, reclaims,
     generation, spent, claimed_at, progressed_at)
  SELECT lane_id, batch_id, owner, session, band, weight, pool, route, limited, %(worker)s::uuid, ordinals, attempt,
         reclaims + 1, generation, spent,
         @now, @now
    FROM lost
   WHERE given_up
  RETURNING id, nonce, lane_id, batch_id, route, ordinals, attempt, reclaims, generation, spent
)
SELECT (SELECT count(pg_notify('penstock_work', pool)) FROM (SELECT DISTINCT pool FROM piece) AS again) AS notified,
       (SELECT count(*) FROM lost)::int4 AS lost_leases,
       (SELECT coalesce(sum(size), 0) FROM lost)::int4 AS lost_ordinals,
       c.id, c.nonce, c.lane_id, c.batch_id, c.route, l.endpoint, l.source_id, l.source_lane, c.attempt, c.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(c.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(c.ordinals) r) AS stops, l.session, c.generation, c.spent
  FROM (VALUES (1)) AS always (one)
  LEFT JOIN condemned c ON true
  LEFT JOIN penstock.lanes l ON l.id = c.lane_id

-- name: report_progress
-- Reports progress on leases of this worker: their items wait, or their calls are within their time. Returns those that
-- it still holds. Locked in id order, as a settle does, so that the two cannot deadlock.
WITH mine AS MATERIALIZED (
  SELECT id FROM penstock.leases
   WHERE id = ANY (%(leases)s::int8[]) AND nonce = ANY (%(nonces)s::int8[]) AND worker_id = %(worker)s
   ORDER BY id
     FOR UPDATE
)
UPDATE penstock.leases SET progressed_at = @now
 WHERE id = ANY (ARRAY(SELECT id FROM mine))
RETURNING nonce

-- name: list_forgotten
-- Lists leases of this worker that it does not know: the answer to their claim was lost. For the rare moment after a
-- failed claim.
SELECT c.id, c.nonce, c.lane_id, c.batch_id, c.route, l.endpoint, l.source_id, l.source_lane, c.attempt, c.reclaims,
       ARRAY(SELECT lower(r) FROM unnest(c.ordinals) r) AS starts,
       ARRAY(SELECT upper(r) FROM unnest(c.ordinals) r) AS stops, l.session, c.generation, c.spent
  FROM penstock.leases c
  JOIN penstock.lanes l ON l.id = c.lane_id
 WHERE c.worker_id = %(worker)s AND c.nonce <> ALL (%(known)s::int8[])

-- name: clamp_future_times
-- Corrects times in the future, after the database's clock was set back: they count from now. A live worker checks in
-- again within its interval; without this, a dead one would be noticed only when the clock has caught up. Deferrals wait
-- for as long as they were to, from now.
WITH beaten AS (
  UPDATE penstock.workers SET heartbeat_at = @now
   WHERE id = ANY (ARRAY(
     SELECT id FROM penstock.workers WHERE heartbeat_at > @now FOR UPDATE SKIP LOCKED))
  RETURNING id
),
progressed AS (
  UPDATE penstock.leases SET progressed_at = @now
   WHERE id = ANY (ARRAY(
     SELECT id FROM penstock.leases
      WHERE progressed_at > @now AND %(look_for_stuck)s::boolean
        FOR UPDATE SKIP LOCKED))
  RETURNING id
),
put_off AS (
  UPDATE penstock.deferrals
     SET deferred_at = @now,
         due_at = @now + (due_at - deferred_at)
   WHERE id = ANY (
     ARRAY(
       SELECT id FROM penstock.deferrals
        WHERE deferred_at > @now AND NOT session
        ORDER BY deferred_at DESC
        LIMIT %(limit)s
          FOR UPDATE SKIP LOCKED)
     || ARRAY(
       SELECT id FROM penstock.deferrals
        WHERE deferred_at > @now AND session
        ORDER BY deferred_at DESC
        LIMIT %(limit)s
          FOR UPDATE SKIP LOCKED))
  RETURNING id
)
SELECT (SELECT count(*) FROM beaten), (SELECT count(*) FROM progressed), (SELECT count(*) FROM put_off)

-- name: remove_silent_workers
-- Removes workers that are silent past the grace or known to be gone, once nothing is leased to them. A worker cut off
-- in the middle of a check-in keeps its row locked until the server gives its connection up: such a row is skipped.
DELETE FROM penstock.workers
 WHERE id = ANY (ARRAY(
   SELECT w.id
     FROM penstock.workers w
    WHERE (w.heartbeat_at <= @now - make_interval(secs => %(grace_s)s)
           OR w.id = ANY (%(gone)s::uuid[]))
      AND NOT EXISTS (SELECT FROM penstock.leases l WHERE l.worker_id = w.id)
      FOR UPDATE SKIP LOCKED))

-- name: close_gate
-- Closes a route to claims for a time, in all pools of its provider: the upstream asked for it, or refused calls. A gate
-- only moves later.
INSERT INTO penstock.gates AS g (pool, route, not_before, code, message)
SELECT p.pool, %(route)s, @now + make_interval(secs => %(wait_s)s), %(code)s, %(message)s
  FROM unnest(%(pools)s::text[]) AS p (pool) ORDER BY p.pool
ON CONFLICT (pool, route) DO UPDATE
   SET not_before = excluded.not_before, code = excluded.code, message = excluded.message
 WHERE g.not_before IS NULL OR g.not_before < excluded.not_before

-- name: halt_gate
-- Closes a route until a person acts, in all pools of its provider.
INSERT INTO penstock.gates AS g (pool, route, halted_at, code, message)
SELECT p.pool, %(route)s, @now, %(code)s, %(message)s FROM unnest(%(pools)s::text[]) AS p (pool) ORDER BY p.pool
ON CONFLICT (pool, route) DO UPDATE
   SET halted_at = excluded.halted_at, code = excluded.code, message = excluded.message
 WHERE g.halted_at IS NULL

-- name: list_gates
-- Lists the gates of a pool that are closed now.
SELECT route, not_before, halted_at, code, message
  FROM penstock.gates
 WHERE pool = %(pool)s AND (halted_at IS NOT NULL OR not_before > @now)

-- name: open_gates
-- Opens the halted gates of a pool: a person says the reason is gone.
DELETE FROM penstock.gates WHERE pool = %(pool)s AND halted_at IS NOT NULL

-- name: open_old_gates
-- Opens the gates of a pool that were halted long ago, to see whether the reason is gone.
DELETE FROM penstock.gates
 WHERE pool = %(pool)s AND halted_at < @now - make_interval(secs => %(probe_s)s)

-- name: shorten_gates
-- Shortens the waits of a pool to `wait_s`.
UPDATE penstock.gates
   SET not_before = least(not_before, @now + make_interval(secs => %(wait_s)s))
 WHERE pool = %(pool)s AND not_before IS NOT NULL
