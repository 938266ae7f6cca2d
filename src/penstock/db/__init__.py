"""The database: connections, named SQL, migrations, and the server Penstock brings along."""
