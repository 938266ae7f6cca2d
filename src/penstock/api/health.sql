-- name: list_migrations
-- What the database has been through, to be compared with what this version needs.
SELECT number FROM penstock.migrations;
