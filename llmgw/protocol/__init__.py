"""How agents, routers and control planes talk: typed messages, their bytes, and the channel that carries them."""
