"""Outrider on Ray: verifier and drafter are actors, the router is the launcher's own process.

config.py    LaunchConfig
actors.py    the endpoints, as they are made within their actors
cluster.py   starting or joining Ray, and stopping it without leaving a process behind
places.py    a placement group with a bundle for each actor, shares of GPUs
fleet.py     Keeper, Fleet: place the actors, put a new one in the place of a dead one
front.py     the router in this process
"""
