-- name: is_any_server_alive
-- Whether a server or one of its workers has checked in within the grace. The table has a row per process.
SELECT EXISTS (
  SELECT FROM penstock.workers
   WHERE (pool = 'serve' OR pool LIKE 'serve:%%')
     AND heartbeat_at > now() - make_interval(secs => %(grace_s)s));
