-- name: list_queue
-- Lists items not decided yet, by pool, route and state. It reads small rows of control tables, `rows` of each at most;
-- never a payload. Requests of a session behind the one under way are in lanes that cannot be claimed from: those are
-- found by what is leased or deferred of them.
WITH
runnable AS (
  SELECT pool, route, total - next AS size FROM penstock.lanes WHERE runnable LIMIT %(rows)s
),
leased AS MATERIALIZED (
  SELECT lane_id, pool, route, size, limited FROM penstock.leases LIMIT %(rows)s
),
deferred AS MATERIALIZED (
  SELECT lane_id, pool, route, size, limited,
         CASE WHEN held THEN 'held' WHEN due_at <= @now THEN 'due' ELSE 'later' END AS state
    FROM penstock.deferrals LIMIT %(rows)s
),
behind AS (
  SELECT l.pool, l.route, l.total - l.next AS size
    FROM penstock.lanes l
   WHERE l.id = ANY (ARRAY(
           SELECT lane_id FROM leased WHERE limited UNION SELECT lane_id FROM deferred WHERE limited))
     AND l.open AND NOT l.runnable AND l.next < l.total
)
SELECT pool, route, 'pending' AS state, sum(size)::int8, 0::int8 FROM runnable GROUP BY pool, route
 UNION ALL
SELECT pool, route, 'pending', sum(size)::int8, 0 FROM behind GROUP BY pool, route
 UNION ALL
SELECT pool, route, 'leased', sum(size)::int8, count(*) FROM leased GROUP BY pool, route
 UNION ALL
SELECT pool, route, state, sum(size)::int8, 0 FROM deferred GROUP BY pool, route, state

-- name: list_registered
-- Lists how many workers are registered, by pool and state. A silent one is about to be declared dead.
SELECT pool,
       CASE WHEN heartbeat_at <= @now - make_interval(secs => %(grace_s)s) THEN 'silent'
            WHEN draining THEN 'draining'
            ELSE 'alive' END AS state,
       count(*)
  FROM penstock.workers
 GROUP BY 1, 2

-- name: list_gates
-- Lists how many routes are closed, by pool and state.
SELECT pool, CASE WHEN halted_at IS NULL THEN 'waiting' ELSE 'halted' END AS state, count(*)
  FROM penstock.gates
 WHERE halted_at IS NOT NULL OR not_before > @now
 GROUP BY 1, 2

-- name: list_limits
-- Lists the limits of calls, by provider and model, `rows` at most.
SELECT provider, model, calls::float8, floor::float8, ceiling::float8, per_s::float8
  FROM penstock.limits
 LIMIT %(rows)s
