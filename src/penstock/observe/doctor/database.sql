-- name: read_role
-- Reads what this role may do: is the server writable, may a schema be made, whose is Penstock's, are its tables usable.
SELECT current_user, pg_is_in_recovery() OR current_setting('default_transaction_read_only')::boolean AS read_only,
       has_database_privilege(current_database(), 'CREATE') AS may_create,
       (SELECT nspname FROM pg_namespace WHERE nspname = 'penstock') IS NOT NULL AS has_schema,
       coalesce((SELECT pg_has_role(nspowner, 'MEMBER') FROM pg_namespace WHERE nspname = 'penstock'), false) AS owns,
       ARRAY(SELECT relname::text FROM pg_class
              WHERE relnamespace = (SELECT oid FROM pg_namespace WHERE nspname = 'penstock') AND relkind = 'r'
                AND NOT (has_schema_privilege(relnamespace, 'USAGE') AND has_table_privilege(oid, 'SELECT')
                         AND has_table_privilege(oid, 'INSERT'))
              ORDER BY relname) AS unusable;

-- name: read_clock
-- Reads the database's clock.
SELECT extract(epoch FROM clock_timestamp())::float8;

-- name: read_connections
-- Reads how many connections the server, the database and the role allow, and how many there are of others.
SELECT current_setting('max_connections')::int4
         - current_setting('superuser_reserved_connections')::int4
         - coalesce(current_setting('reserved_connections', true)::int4, 0) AS allowed,
       (SELECT datconnlimit FROM pg_database WHERE datname = current_database()) AS of_database,
       (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS of_role,
       (SELECT count(*)::int4 FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()) AS used,
       (SELECT count(*)::int4 FROM pg_stat_activity
         WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
           AND starts_with(application_name, 'penstock')) AS ours;

-- name: read_settings
-- Reads settings as a new session of this role has them; times in milliseconds.
SELECT name, setting FROM pg_settings WHERE name = ANY (%(names)s::text[]);

-- name: list_old_snapshots
-- Lists what keeps dead rows from being removed: transactions, prepared ones, and replication slots that no one reads.
SELECT * FROM (
  SELECT 'transaction of process ' || pid || coalesce(' (' || nullif(application_name, '') || ')', '') AS holder,
         extract(epoch FROM clock_timestamp() - xact_start)::float8 AS age_s,
         'SELECT pg_terminate_backend(' || pid || ')' AS cure
    FROM pg_stat_activity
   WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
     AND (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL)
  UNION ALL
  SELECT 'prepared transaction ' || quote_literal(gid), extract(epoch FROM clock_timestamp() - prepared)::float8,
         'ROLLBACK PREPARED ' || quote_literal(gid)
    FROM pg_prepared_xacts
   WHERE database = current_database()
  UNION ALL
  SELECT 'unread replication slot ' || slot_name, NULL, 'SELECT pg_drop_replication_slot(' || quote_literal(slot_name) || ')'
    FROM pg_replication_slots
   WHERE NOT active) AS held
 WHERE age_s IS NULL OR age_s > %(older_s)s
 ORDER BY age_s DESC NULLS LAST
 LIMIT 5;

-- name: list_closed_gates
-- Lists the routes that wait, for a time or for a person.
SELECT pool, route, halted_at IS NOT NULL AS halted, coalesce(code, ''),
       extract(epoch FROM not_before - now())::float8 AS wait_s
  FROM penstock.gates
 WHERE halted_at IS NOT NULL OR not_before > now()
 ORDER BY halted DESC, pool, route
 LIMIT 20;

-- name: count_workers
-- Counts workers that beat and silent ones, and what the silent and the removed still hold. A row per worker and lease.
SELECT (SELECT count(*)::int4 FROM penstock.workers
         WHERE heartbeat_at > now() - make_interval(secs => %(grace_s)s)) AS alive,
       (SELECT count(*)::int4 FROM penstock.workers
         WHERE heartbeat_at <= now() - make_interval(secs => %(grace_s)s)) AS silent,
       count(*)::int4 AS leases, coalesce(sum(size), 0)::int8 AS items
  FROM penstock.leases
 WHERE worker_id <> ALL (ARRAY(SELECT id FROM penstock.workers
                                WHERE heartbeat_at > now() - make_interval(secs => %(grace_s)s)));
