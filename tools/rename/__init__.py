"""Moves modules and renames symbols by the tables in this folder; see README.md."""
