"""Graph rewrites, one concept a file; each is a frozen dataclass with `run(program)`."""
