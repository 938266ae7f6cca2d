-- Payload tables have no triggers: Citus distributes none that has one. What is stored once is still not updated: the
-- owner of the tables loses the right to, and would have to give it back to itself first. A superuser, such as the one
-- of the embedded server, has every right and is kept from nothing; that no statement of Penstock's updates these tables
-- or locks their rows, which takes the same right, is checked by its tests.
-- Code from before does not notice: it has never updated them.
DROP TRIGGER templates_are_immutable ON penstock.templates;
DROP TRIGGER file_chunks_are_immutable ON penstock.file_chunks;
DROP TRIGGER attempts_are_append_only ON penstock.attempts;
DROP TRIGGER reclaims_are_append_only ON penstock.reclaims;
DROP FUNCTION penstock.refuse_update();

DO $$
DECLARE
  owned record;
BEGIN
  FOR owned IN
    SELECT oid::regclass AS name, relowner::regrole AS owner FROM pg_class
     WHERE relnamespace = 'penstock'::regnamespace
       AND relname IN ('templates', 'file_chunks', 'attempts', 'reclaims')
  LOOP
    EXECUTE format('REVOKE UPDATE ON %s FROM %s', owned.name, owned.owner);
  END LOOP;
END $$;
