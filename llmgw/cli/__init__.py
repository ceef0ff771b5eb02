"""The command line: a module per command, each loaded when it is called. Roles are handed to `wiring`."""
