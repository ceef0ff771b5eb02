"""`llmgw ctl`: the admin API on a terminal. Synchronous; sees the domain, settings and HTTP, never Trio or a server's code."""
