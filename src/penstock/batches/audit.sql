-- name: record_change
-- Records a change that a user made, in the transaction that makes it.
INSERT INTO penstock.audit (at, owner, actor, client, action, object_id, details)
VALUES (@now, %(owner)s, %(actor)s, %(client)s, %(action)s, %(object_id)s, %(details)s::jsonb)

-- name: list_changes
-- Lists changes, newest first, from an id on.
SELECT id, at, owner, actor, client, action, object_id, details
  FROM penstock.audit
 WHERE id < %(below)s
 ORDER BY id DESC
 LIMIT %(limit)s

-- name: list_changes_of
-- Lists the changes of one object, newest first, from an id on.
SELECT id, at, owner, actor, client, action, object_id, details
  FROM penstock.audit
 WHERE object_id = %(object_id)s AND id < %(below)s
 ORDER BY id DESC
 LIMIT %(limit)s

-- name: forget_changes_if_old
-- Deletes the oldest changes that were kept long enough. Ids grow with time: only the first are looked at.
DELETE FROM penstock.audit
 WHERE id = ANY (ARRAY(SELECT id FROM penstock.audit ORDER BY id LIMIT %(limit)s))
   AND at <= @now - make_interval(secs => %(keep_s)s)
