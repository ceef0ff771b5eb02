"""The router's cost beside its peers': one fake engine, one load, and each service between them in turn, on a core of its own."""
