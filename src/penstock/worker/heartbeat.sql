-- name: heartbeat_if_known
-- Checks the workers of a process in, on the database's clock. One that does not come back was declared dead: it must
-- take a new id.
UPDATE penstock.workers
   SET heartbeat_at = @now, draining = id = ANY (%(draining)s::uuid[])
 WHERE id = ANY (%(ids)s::uuid[])
RETURNING id
