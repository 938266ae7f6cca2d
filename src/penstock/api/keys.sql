-- name: find_key_by_hash
-- A key by the hash of the presented secret, and whether it can be used now. One index probe.
SELECT id, owner, role, hash, revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()) AS usable
  FROM penstock.api_keys
 WHERE hash = %(hash)s;

-- name: list_usable_keys
-- Which of some keys can be used now.
SELECT id FROM penstock.api_keys
 WHERE id = ANY(%(ids)s) AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now());

-- name: has_any_key
-- Whether a key was ever made. Rows stay when keys are revoked, so that a server never falls back to letting all in.
SELECT EXISTS (SELECT FROM penstock.api_keys);

-- name: insert_key
-- Inserts a key: its hash and the part of it that can be shown.
INSERT INTO penstock.api_keys (id, owner, name, role, prefix, hash, created_at, expires_at)
VALUES (%(id)s, %(owner)s, %(name)s, %(role)s, %(prefix)s, %(hash)s, now(),
        now() + make_interval(secs => %(expires_after_s)s))
RETURNING id, owner, name, role, prefix, created_at, expires_at, revoked_at;

-- name: list_keys_before
-- A page of keys, newest first, below the given id.
SELECT id, owner, name, role, prefix, created_at, expires_at, revoked_at
  FROM penstock.api_keys
 WHERE %(after)s::uuid IS NULL OR id < %(after)s::uuid
 ORDER BY id DESC
 LIMIT %(limit)s;

-- name: revoke_key
-- Revokes a key. The time of the first revocation stays.
UPDATE penstock.api_keys SET revoked_at = coalesce(revoked_at, now())
 WHERE id = %(id)s
RETURNING id, owner, name, role, prefix, created_at, expires_at, revoked_at;

-- name: find_key_by_sign_in
-- The key of a sign-in by the hash of its token, and whether both can be used now.
SELECT k.id, k.owner, k.role, s.hash,
       k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now()) AND s.expires_at > now() AS usable
  FROM penstock.sign_ins s
  JOIN penstock.api_keys k ON k.id = s.key_id
 WHERE s.hash = %(hash)s;

-- name: sign_in
-- Stores a sign-in, and removes some that have expired.
WITH gone AS (
  DELETE FROM penstock.sign_ins
   WHERE hash = ANY (ARRAY(SELECT hash FROM penstock.sign_ins WHERE expires_at < now() ORDER BY expires_at LIMIT 100))
)
INSERT INTO penstock.sign_ins (hash, key_id, created_at, expires_at)
VALUES (%(hash)s, %(key_id)s, now(), now() + make_interval(secs => %(life_s)s));

-- name: sign_out
-- Removes a sign-in.
DELETE FROM penstock.sign_ins WHERE hash = %(hash)s;
