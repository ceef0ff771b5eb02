"""A module per noun: each gives its routes, whose handlers call the owners and return replies."""
