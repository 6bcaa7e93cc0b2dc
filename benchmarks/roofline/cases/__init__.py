"""One module a family, each with a list `OPERATORS`."""
