"""Who may speak to whom: the cluster's own certificate authority, join tokens, and what TLS is made of between our machines."""
