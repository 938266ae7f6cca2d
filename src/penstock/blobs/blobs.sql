-- An ingest locks the images it adds uses of, in the order of their digests, until it commits. A purge waits for none: it
-- locks the images whose uses it deletes, as far as they are free, and only then looks whether others use them.

-- name: hold_blobs
-- Makes the images that their owner does not have yet, and locks all of them: until the commit no purge deletes one.
INSERT INTO penstock.blobs AS b (owner, digest, size)
SELECT %(owner)s, t.digest, t.size
  FROM unnest(%(digests)s::bytea[], %(sizes)s::int4[]) AS t (digest, size)
 ORDER BY t.digest
ON CONFLICT (owner, digest) DO UPDATE SET size = excluded.size
RETURNING b.digest, b.id

-- name: list_stored
-- Lists which of these images have their bytes stored.
SELECT blob_id FROM penstock.blob_bytes WHERE blob_id = ANY (%(ids)s::int8[])

-- name: store_bytes
-- Stores an image's bytes, in the transaction that made the image.
INSERT INTO penstock.blob_bytes (blob_id, bytes) VALUES (%(id)s, %(bytes)b)

-- name: add_uses
-- Says which image each of some rows stands for.
INSERT INTO penstock.blob_uses (source_id, source_lane, ordinal, blob_id)
SELECT %(source_id)s, %(source_lane)s, t.ordinal, t.blob_id
  FROM unnest(%(ordinals)s::int4[], %(ids)s::int8[]) AS t (ordinal, blob_id)

-- name: list_used
-- Lists the images of some rows, and their sizes. Rows that stand for no image are left out.
SELECT w.ordinal, u.blob_id, b.size
  FROM unnest(%(ordinals)s::int4[]) AS w (ordinal)
 CROSS JOIN LATERAL (
   SELECT blob_id FROM penstock.blob_uses
    WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal = w.ordinal
    LIMIT 1) AS u
 CROSS JOIN LATERAL (SELECT size FROM penstock.blobs WHERE id = u.blob_id LIMIT 1) AS b
 ORDER BY w.ordinal

-- name: read_bytes
-- Reads the bytes of some images.
SELECT blob_id, bytes FROM penstock.blob_bytes WHERE blob_id = ANY (%(ids)s::int8[])

-- name: hold_used_if_free
-- Locks the images that the next rows of a source use, except those that another transaction has locked.
SELECT id FROM penstock.blobs
 WHERE id = ANY (ARRAY(
   SELECT blob_id FROM penstock.blob_uses
    WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= %(next)s::int4
     AND ordinal < %(total)s::int4
    ORDER BY ordinal
    LIMIT %(rows)s))
   FOR UPDATE SKIP LOCKED

-- name: erase_uses_if_held
-- Deletes the uses of a source's next rows, as far as their images are held, and the images that no other row uses.
-- Returns where to go on, the uses deleted, and the images whose bytes are to be deleted. A statement of its own, after
-- the locks were taken: it sees every use that was stored before, and none can be stored meanwhile. The last use of an
-- image is looked at first: those before it are being deleted.
WITH page AS MATERIALIZED (
  SELECT ordinal, blob_id FROM penstock.blob_uses
   WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= %(next)s::int4
     AND ordinal < %(total)s::int4
   ORDER BY ordinal
   LIMIT %(rows)s
),
edge AS MATERIALIZED (
  SELECT coalesce(min(ordinal) FILTER (WHERE blob_id <> ALL (%(held)s::int8[])),
                  CASE WHEN count(*) < %(rows)s THEN %(total)s::int4 ELSE max(ordinal) + 1 END) AS ordinal
    FROM page
),
gone AS (
  DELETE FROM penstock.blob_uses
   WHERE source_id = %(source_id)s AND source_lane = %(source_lane)s AND ordinal >= %(next)s::int4
     AND ordinal < (SELECT ordinal FROM edge)
  RETURNING ordinal
),
unused AS (
  DELETE FROM penstock.blobs b
   WHERE b.id = ANY (ARRAY(SELECT blob_id FROM page WHERE ordinal < (SELECT ordinal FROM edge)))
     AND (SELECT u.ordinal FROM penstock.blob_uses u
           WHERE u.blob_id = b.id
             AND NOT (u.source_id = %(source_id)s AND u.source_lane = %(source_lane)s AND u.ordinal >= %(next)s::int4
                      AND u.ordinal < (SELECT ordinal FROM edge))
           ORDER BY u.source_id DESC, u.source_lane DESC, u.ordinal DESC
           LIMIT 1) IS NULL
  RETURNING b.id
)
SELECT ordinal, (SELECT count(*) FROM gone), ARRAY(SELECT id FROM unused) FROM edge

-- name: erase_bytes
-- Deletes the bytes of images that are deleted in this transaction.
DELETE FROM penstock.blob_bytes WHERE blob_id = ANY (%(ids)s::int8[])
