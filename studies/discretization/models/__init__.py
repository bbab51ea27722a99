"""The models that are compared, and how stiff they are."""
