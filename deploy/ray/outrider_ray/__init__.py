"""Outrider on Ray: the three processes as actors."""
