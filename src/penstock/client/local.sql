-- name: is_any_server_alive
-- Whether a server or one of its workers has a heartbeat within the grace. The table has a row per worker.
SELECT EXISTS (
  SELECT FROM penstock.workers
   WHERE (pool = 'serve' OR pool LIKE 'serve:%%')
     AND heartbeat_at > now() - make_interval(secs => %(grace_s)s));
