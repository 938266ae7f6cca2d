-- Workers look once a round whether anything was taken back from the lost, to call that before what they hold.
CREATE INDEX deferrals_reclaimed ON penstock.deferrals (pool, route)
  WHERE reason = 'reclaimed' AND NOT suspect AND NOT held;

-- Nearly everything that is leased is one range. A function in SQL is parsed anew by every statement that stores a lease,
-- a third of what that took; one in PL/pgSQL is kept.
CREATE OR REPLACE FUNCTION penstock.ordinal_count(ordinals int4multirange) RETURNS int4
LANGUAGE plpgsql IMMUTABLE PARALLEL SAFE STRICT
AS $$
BEGIN
  IF int4multirange(range_merge(ordinals)) = ordinals THEN
    RETURN coalesce(upper(ordinals) - lower(ordinals), 0);
  END IF;
  RETURN (SELECT sum(upper(r) - lower(r)) FROM unnest(ordinals) AS r);
END
$$;
