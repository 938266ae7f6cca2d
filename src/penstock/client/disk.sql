-- name: measure
-- Bytes of the whole database, indexes and all.
SELECT pg_database_size(current_database())

-- name: list_tables_with_room
-- Tables with so many bytes that it is worth while to look at them, the smallest first.
SELECT format('%%I.%%I', n.nspname, c.relname)
  FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
 WHERE n.nspname = 'penstock' AND c.relkind = 'r' AND pg_total_relation_size(c.oid) > %(bytes)s
 ORDER BY pg_total_relation_size(c.oid)

-- name: is_anybody_at_work
-- Whether a run, a server or a worker has a heartbeat within the grace.
SELECT EXISTS (SELECT FROM penstock.workers WHERE heartbeat_at > now() - make_interval(secs => %(grace_s)s))
