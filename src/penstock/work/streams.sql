-- Pieces of answers on their way to callers who wait at another server.

-- name: append_pieces_if_leased
-- Stores pieces and tells those who wait, in one statement. Pieces of a lease that was taken back are not stored: what
-- its worker still reads is nobody's answer. Storing the same piece again changes nothing.
WITH live AS MATERIALIZED (
  SELECT nonce FROM penstock.leases WHERE id = ANY (%(leases)b::int8[])
),
stored AS (
  INSERT INTO penstock.session_stream (request_id, lease_id, lease_nonce, piece, bytes)
  SELECT p.request_id, p.lease_id, p.nonce, p.piece, p.bytes
    FROM unnest(%(requests)s::uuid[], %(leases)b::int8[], %(nonces)b::int8[], %(pieces)b::int4[], %(bytes)b::bytea[])
         AS p (request_id, lease_id, nonce, piece, bytes)
   WHERE p.nonce IN (SELECT nonce FROM live)
  ON CONFLICT DO NOTHING
  RETURNING lease_id
)
SELECT pg_notify('penstock_answers', %(lanes)s) WHERE EXISTS (SELECT FROM stored);

-- name: read_pieces_after
-- What has come of each stream since the place its reader knows; n tells the readers apart. A new lease comes after
-- the one before it: the call was begun anew.
SELECT w.n::int4, s.lease_id, s.lease_nonce, s.piece, s.bytes
  FROM unnest(%(requests)s::uuid[], %(leases)b::int8[], %(pieces)b::int4[])
       WITH ORDINALITY AS w (request_id, lease_id, piece, n)
 CROSS JOIN LATERAL (
   SELECT s.lease_id, s.lease_nonce, s.piece, s.bytes
     FROM penstock.session_stream s
    WHERE s.request_id = w.request_id AND (s.lease_id, s.piece) > (w.lease_id, w.piece)
    ORDER BY s.lease_id, s.piece
    LIMIT %(limit)s) AS s
 ORDER BY w.n, s.lease_id, s.piece;

-- name: forget_pieces
-- The answers are recorded as a whole: nobody needs their pieces any more.
DELETE FROM penstock.session_stream WHERE request_id = ANY (%(requests)s::uuid[]);

-- name: sweep_pieces_if_unleased
-- What workers left behind that did not live to forget it.
DELETE FROM penstock.session_stream
 WHERE request_id = ANY (ARRAY(
   SELECT s.request_id
     FROM penstock.session_stream s
    WHERE s.request_id < %(before)s::uuid
      AND NOT EXISTS (SELECT FROM penstock.leases l WHERE l.id = s.lease_id)
    LIMIT %(limit)s));
