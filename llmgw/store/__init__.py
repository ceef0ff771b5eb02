"""The cluster's memory: SQLite through apsw, one module per family of tables. SQL stands nowhere else but in `lease.file`."""
