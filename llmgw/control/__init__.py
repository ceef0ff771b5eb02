"""The control plane: who leads, what is asked for, what is, the plan between them, and what routers are told."""
