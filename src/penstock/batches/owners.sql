-- name: set_weight
-- Sets an owner's weight: its share of the work beside the others. Its lanes that wait keep their place for this turn.
WITH owner AS (
  INSERT INTO penstock.owners (owner, weight) VALUES (%(owner)s, %(weight)s)
  ON CONFLICT (owner) DO UPDATE SET weight = excluded.weight
  RETURNING owner, weight
),
lane AS MATERIALIZED (
  SELECT id FROM penstock.lanes WHERE owner = (SELECT owner FROM owner) AND NOT session AND next < total
   ORDER BY id
     FOR UPDATE
)
UPDATE penstock.lanes SET weight = (SELECT weight FROM owner) WHERE id = ANY (ARRAY(SELECT id FROM lane))

-- name: list_weights
-- Lists the owners with a weight of their own.
SELECT owner, weight::float8 FROM penstock.owners WHERE coalesce(%(owner)s = owner, true) ORDER BY owner
