-- name: is_any_server_alive
-- Whether a server or one of its workers has a heartbeat within the grace. The table has a row per worker.
SELECT EXISTS (
  SELECT FROM penstock.workers
   WHERE (pool = 'serve' OR pool LIKE 'serve:%%')
     AND heartbeat_at > now() - make_interval(secs => %(grace_s)s));

-- name: is_run_worked_off
-- Whether a batch is one of `penstock run`, and whether a worker of that run has a heartbeat within the grace.
SELECT b.pool LIKE 'run:%%',
       EXISTS (SELECT FROM penstock.workers w
                WHERE w.pool = b.pool AND w.heartbeat_at > now() - make_interval(secs => %(grace_s)s))
  FROM penstock.batches b
 WHERE b.id = %(id)s AND (b.deleted_at IS NULL) IS TRUE;
