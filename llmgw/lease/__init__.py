"""The lease: which process of several on one store may place work. Rules, stores of its record, and the task between them."""
