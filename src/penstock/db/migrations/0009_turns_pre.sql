-- Whose turn it is, and what later pages and re-runs need to know of what is claimed and put off.
--
-- Runnable lanes, and deferrals that are due, stand in one line per pool and route: by band (priority), then by tag. A
-- tag is a point in virtual time, which moves on by the work done divided by the weights of the owners it is done for.
-- `step` is what the next turn is charged; `tag - step` of the first in line is the virtual time it is now. Sessions
-- stand in line by the time at which they became ready, in seconds.
-- A tag is in an index, and to write one is to write to every index of its lane. Where there is only one owner with one
-- lane nobody needs to move: then most claims leave the tag as it is, and touch no index.
-- Code from before knows none of this. It claims in its own order until `post`; lanes it makes have no tag until the
-- next round gives them one.

-- An owner's share beside the others; 1 where nothing is said.
CREATE TABLE penstock.owners (
  owner   text PRIMARY KEY CHECK (owner <> ''),
  weight  float4 NOT NULL CHECK (weight >= 0.01 AND weight <= 100)
);

ALTER TABLE penstock.lanes
  ADD COLUMN owner text NOT NULL DEFAULT '',
  ADD COLUMN created_at timestamptz NOT NULL DEFAULT now(),
  ADD COLUMN band int2 NOT NULL GENERATED ALWAYS AS (-priority) STORED,
  ADD COLUMN weight float4 NOT NULL DEFAULT 1 CHECK (weight > 0),
  -- How many times its weight it counts, for the deadline that comes nearer.
  ADD COLUMN nearness int2 NOT NULL DEFAULT 1 CHECK (nearness > 0),
  ADD COLUMN step float8 NOT NULL DEFAULT 0,
  ADD COLUMN tag float8;
UPDATE penstock.lanes l
   SET owner = b.owner, created_at = b.created_at, tag = 0
  FROM penstock.batches b
 WHERE NOT l.session AND b.id = l.batch_id;
UPDATE penstock.lanes l
   SET owner = s.owner, created_at = s.created_at,
       tag = CASE WHEN isfinite(l.turn) THEN extract(epoch FROM l.turn) ELSE 0 END
  FROM penstock.sessions s
 WHERE l.session AND s.id = l.batch_id;
CREATE INDEX lanes_in_line ON penstock.lanes (pool, route, band, tag, id) WHERE runnable;
-- The last of an owner's that is in line: what comes next of it comes after. Looked for by one key: with several, a
-- planner who expects few rows may as well walk the line itself.
CREATE INDEX lanes_of_owner ON penstock.lanes ((ARRAY[pool, route, band::text, owner]), tag)
  WHERE runnable AND NOT session;
CREATE INDEX lanes_without_tag ON penstock.lanes (id) WHERE tag IS NULL AND runnable;

ALTER TABLE penstock.leases
  ADD COLUMN owner text NOT NULL DEFAULT '',
  ADD COLUMN session boolean NOT NULL DEFAULT false,
  ADD COLUMN band int2 NOT NULL DEFAULT 0,
  ADD COLUMN weight float4 NOT NULL DEFAULT 1;
UPDATE penstock.leases h
   SET owner = l.owner, session = l.session, band = l.band, weight = l.weight
  FROM penstock.lanes l
 WHERE l.id = h.lane_id;

ALTER TABLE penstock.deferrals
  ADD COLUMN owner text NOT NULL DEFAULT '',
  ADD COLUMN session boolean NOT NULL DEFAULT false,
  ADD COLUMN deferred_at timestamptz NOT NULL DEFAULT now(),
  ADD COLUMN band int2 NOT NULL DEFAULT 0,
  ADD COLUMN weight float4 NOT NULL DEFAULT 1,
  ADD COLUMN step float8 NOT NULL DEFAULT 0,
  -- Given once it is due.
  ADD COLUMN tag float8;
UPDATE penstock.deferrals d
   SET owner = l.owner, session = l.session, band = l.band, weight = l.weight
  FROM penstock.lanes l
 WHERE l.id = d.lane_id;
CREATE INDEX deferrals_in_line ON penstock.deferrals (pool, route, band, tag, id)
  WHERE tag IS NOT NULL AND NOT held AND NOT suspect;
CREATE INDEX deferrals_of_owner ON penstock.deferrals ((ARRAY[pool, route, band::text, owner]), tag)
  WHERE tag IS NOT NULL AND NOT held AND NOT suspect AND NOT session;
CREATE INDEX deferrals_to_line_up ON penstock.deferrals (pool, route, due_at, id)
  WHERE tag IS NULL AND NOT held AND NOT suspect;

-- Pages of what is in flight and of what waits for another try, by the time of the last change: of a batch, of an owner,
-- of all. Sessions are read in their own order.
CREATE INDEX leases_by_time ON penstock.leases (claimed_at, id) WHERE NOT session;
CREATE INDEX leases_of_owner_by_time ON penstock.leases (owner, claimed_at, id) WHERE NOT session;
CREATE INDEX leases_of_batch_by_time ON penstock.leases (batch_id, claimed_at, id) WHERE NOT session;
CREATE INDEX deferrals_by_time ON penstock.deferrals (deferred_at, id) WHERE NOT session;
CREATE INDEX deferrals_of_owner_by_time ON penstock.deferrals (owner, deferred_at, id) WHERE NOT session;
CREATE INDEX deferrals_of_batch_by_time ON penstock.deferrals (batch_id, deferred_at, id) WHERE NOT session;

-- In the last hour before its deadline a batch counts twice, in the last half hour four times, and so on, up to sixteen.
CREATE FUNCTION penstock.nearness(deadline timestamptz, at timestamptz) RETURNS int2
LANGUAGE sql IMMUTABLE PARALLEL SAFE
AS $$
  SELECT CASE WHEN deadline > at + interval '1 hour' THEN 1
              WHEN deadline > at + interval '30 minutes' THEN 2
              WHEN deadline > at + interval '15 minutes' THEN 4
              WHEN deadline > at + interval '7.5 minutes' THEN 8
              ELSE 16 END::int2
$$;

-- What time it is in a band: where the work being done now stands, looked for from a place on.
-- A function keeps its plans, also one that was made when the tables were empty: this one is planned anew each time.
CREATE FUNCTION penstock.line_start(of_pool text, of_route text, of_band int2, from_tag float8) RETURNS float8
LANGUAGE sql STABLE
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off
AS $$
  SELECT greatest(0, from_tag, least(
    (SELECT tag - step FROM penstock.lanes
      WHERE pool = of_pool AND route = of_route AND band = of_band AND runnable AND tag >= from_tag
      ORDER BY tag, id LIMIT 1),
    (SELECT tag - step FROM penstock.deferrals
      WHERE pool = of_pool AND route = of_route AND band = of_band
        AND tag IS NOT NULL AND NOT held AND NOT suspect AND tag >= from_tag
      ORDER BY tag, id LIMIT 1)))
$$;

-- Where in line an owner's next turn begins: behind its own last, and not before the work being done now. What counts
-- several times for its deadline passes as many times faster.
CREATE FUNCTION penstock.line_end(of_pool text, of_route text, of_band int2, of_owner text, nearness int2) RETURNS float8
LANGUAGE sql STABLE
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off
AS $$
  SELECT v.start + greatest(
           0,
           (SELECT tag FROM penstock.lanes
             WHERE ARRAY[pool, route, band::text, owner] = ARRAY[of_pool, of_route, of_band::text, of_owner]
               AND runnable AND NOT session AND tag IS NOT NULL
             ORDER BY tag DESC LIMIT 1) - v.start,
           (SELECT tag FROM penstock.deferrals
             WHERE ARRAY[pool, route, band::text, owner] = ARRAY[of_pool, of_route, of_band::text, of_owner]
               AND tag IS NOT NULL AND NOT held AND NOT suspect AND NOT session AND tag > v.start
             ORDER BY tag DESC LIMIT 1) - v.start) / nearness
    FROM (SELECT penstock.line_start(of_pool, of_route, of_band, '-infinity') AS start OFFSET 0) AS v
$$;
