-- name: list_migrations
-- Migrations that the database has had, to be compared with those that this version needs.
SELECT number FROM penstock.migrations;
