"""A user's module that cannot be imported."""

raise RuntimeError("broken on import")
