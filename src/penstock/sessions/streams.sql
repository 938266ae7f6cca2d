-- Pieces of streamed answers, for callers who wait at another server.

-- name: append_pieces_if_leased
-- Stores pieces and notifies waiting callers, in one statement. Pieces of a lease that was taken back are not stored:
-- the answer that its worker still reads will not be recorded. Storing the same piece again changes nothing.
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
-- Reads the pieces of each stream after its reader's position; n tells the readers apart. Pieces of a new lease come
-- after those of the one before it: the call was made again.
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
-- Deletes the pieces of answers that are recorded as a whole.
DELETE FROM penstock.session_stream WHERE request_id = ANY (%(requests)s::uuid[]);

-- name: sweep_pieces_if_unleased
-- Deletes pieces left by lost workers.
DELETE FROM penstock.session_stream
 WHERE request_id = ANY (ARRAY(
   SELECT s.request_id
     FROM penstock.session_stream s
    WHERE s.request_id < %(before)s::uuid
      AND NOT EXISTS (SELECT FROM penstock.leases l WHERE l.id = s.lease_id)
    LIMIT %(limit)s));
