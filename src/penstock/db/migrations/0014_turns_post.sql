-- The order in which code from before 0009 claimed.
DROP INDEX penstock.lanes_runnable;
ALTER TABLE penstock.lanes DROP COLUMN turn;
