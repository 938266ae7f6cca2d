-- name: heartbeat_if_known
-- Checks the workers of a process in, on the database's clock. A worker that is not returned was declared dead: it must
-- take a new id.
UPDATE penstock.workers
   SET heartbeat_at = @now, draining = id = ANY (%(draining)s::uuid[])
 WHERE id = ANY (%(ids)s::uuid[])
RETURNING id
