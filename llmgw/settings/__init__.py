"""What an operator may set: the schema, and the way from a file to values with every fault told. Never writes a setting."""
