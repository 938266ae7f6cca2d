-- name: list_unserved
-- Lists providers' pools and routes with anything to claim, now or later, that are none of the caller's and have no live
-- worker. One index probe for each pool and route.
WITH RECURSIVE
lane_place AS (
  SELECT '' AS pool, '' AS route
  UNION ALL
  SELECT l.pool, l.route
    FROM lane_place p
   CROSS JOIN LATERAL (
     SELECT pool, route FROM penstock.lanes
      WHERE runnable AND (pool, route) > (p.pool, p.route)
      ORDER BY pool, route LIMIT 1) AS l
),
deferred_place AS (
  SELECT '' AS pool, '' AS route
  UNION ALL
  SELECT d.pool, d.route
    FROM deferred_place p
   CROSS JOIN LATERAL (
     SELECT pool, route FROM penstock.deferrals
      WHERE NOT held AND (pool, route) > (p.pool, p.route)
      ORDER BY pool, route LIMIT 1) AS d
),
place AS (
  SELECT pool, route FROM lane_place UNION SELECT pool, route FROM deferred_place
)
SELECT pool, route FROM place
 WHERE (pool LIKE 'serve:%%' OR pool LIKE 'session:%%') AND pool <> ALL (%(served)s::text[])
   AND NOT EXISTS (
     SELECT FROM penstock.workers w
      WHERE w.pool = place.pool
        AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s))
 ORDER BY pool, route

-- name: move_if_unserved
-- Moves lanes of an unserved route to another pool, with their deferrals and, of sessions, the requests still to come;
-- never rows of jobs, whose definitions name their provider: another one would be sent the rows, with its own key. Only lanes of which nothing is leased, and only while no live worker has the pool. Should a claim be quicker all the
-- same, the ordinals it gives back are found in the old pool, and moved the next time.
WITH found AS MATERIALIZED (
  (SELECT id FROM penstock.lanes
    WHERE pool = %(pool)s AND route = %(route)s AND runnable AND endpoint <> 'rows'
    ORDER BY band, tag, id
    LIMIT %(limit)s)
  UNION
  (SELECT d.lane_id FROM penstock.deferrals d
    WHERE d.pool = %(pool)s AND d.route = %(route)s AND NOT d.held
      AND (SELECT l.endpoint <> 'rows' FROM penstock.lanes l WHERE l.id = d.lane_id)
    ORDER BY suspect, due_at, id
    LIMIT %(limit)s)
),
lane AS MATERIALIZED (
  SELECT l.id, l.batch_id, l.next, l.session
    FROM penstock.lanes l
   WHERE l.id = ANY (ARRAY(SELECT id FROM found)) AND l.endpoint <> 'rows'
     AND NOT EXISTS (
       SELECT FROM penstock.workers w
        WHERE w.pool = %(pool)s
          AND w.heartbeat_at > @now - make_interval(secs => %(grace_s)s))
     AND NOT EXISTS (SELECT FROM penstock.leases h WHERE h.batch_id = l.batch_id AND h.lane_id = l.id OFFSET 0)
   ORDER BY l.id
     FOR UPDATE SKIP LOCKED
),
moved AS (
  UPDATE penstock.lanes SET pool = %(new_pool)s
   WHERE id = ANY (ARRAY(SELECT id FROM lane)) AND pool = %(pool)s AND route = %(route)s
),
deferred AS (
  UPDATE penstock.deferrals SET pool = %(new_pool)s
   WHERE id = ANY (ARRAY(
     SELECT d.id
       FROM lane
      CROSS JOIN LATERAL (
        SELECT id FROM penstock.deferrals
         WHERE batch_id = lane.batch_id AND lane_id = lane.id AND pool = %(pool)s AND route = %(route)s
        OFFSET 0) AS d))
),
-- The requests' ids are found first: the table itself is then probed for these alone.
queued AS (
  UPDATE penstock.session_requests SET pool = %(new_pool)s
   WHERE id = ANY (ARRAY(
     SELECT r.id
       FROM lane
      CROSS JOIN LATERAL (
        SELECT id FROM penstock.session_requests
         WHERE lane_id = lane.id AND ordinal >= lane.next AND pool = %(pool)s AND route = %(route)s
        OFFSET 0) AS r
      WHERE lane.session))
)
SELECT count(*) FROM lane
