-- name: list_workers_after
-- Lists registered workers, by id, with what each holds: leases, their rows, and some of their routes.
SELECT w.id, w.pool, w.host, w.pid, w.started_at, w.heartbeat_at, w.draining,
       w.heartbeat_at > @now - make_interval(secs => %(grace_s)s) AS alive,
       h.leases, h.items, h.routes
  FROM (SELECT * FROM penstock.workers WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) AS w
 CROSS JOIN LATERAL (
   SELECT count(*)::int4 AS leases, coalesce(sum(size), 0)::int8 AS items,
          coalesce(array_agg(DISTINCT route), '{}') AS routes
     FROM (SELECT size, route FROM penstock.leases WHERE worker_id = w.id LIMIT %(leases)s) AS held) AS h
 ORDER BY w.id
