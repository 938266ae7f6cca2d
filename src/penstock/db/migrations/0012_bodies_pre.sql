-- Bodies and answers are stored as they are. By itself PostgreSQL compresses what is over 2 KB, with pglz, and spends more
-- time on that than on everything else together (ADR 14). What is stored already stays as it is, and is read all the same.
ALTER TABLE penstock.templates ALTER COLUMN body SET STORAGE EXTERNAL;
ALTER TABLE penstock.outcomes ALTER COLUMN response SET STORAGE EXTERNAL;
