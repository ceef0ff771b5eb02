"""What the agent knows of each engine: a small pure description per module, and the registry that names them."""
