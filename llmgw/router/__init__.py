"""The data plane: from a client's request to an engine's answer and back. Sees domain, settings and protocol only."""
