"""Outrider on Ray: verifier and drafter are actors, the router is the launcher's own process.

__main__.py                Command line of the launcher.
actor_keeper.py            Restarts an actor that died.
actors.py                  The endpoints as they are made within their actors; torch is imported
                           there and only there.
autoscale.py               How many verifiers and drafters a fleet should have.
cluster.py                 Starting or joining Ray, and stopping it within a bounded time, without
                           leaving a process.
commands.py                `status`, `stop` and `node`.
config.py                  Configuration of the launcher; each field is a key of its TOML file.
embedded_router.py         Runs the router in the launcher's process.
fixed_keys.py              Configuration keys that the launcher sets.
fleet.py                   The actors of one fleet.
fleet_supervision.py       Runs a fleet from start to end.
members.py                 Who belongs to a fleet.
node_keeper.py             Keeps a Ray node joined to its cluster.
placement.py               Placement groups and GPU shares.
scaler.py                  Scales the pools of a fleet.
serve_app.py               Outrider as a Ray Serve application.
supervisor.py              The supervisor of a detached fleet.
"""
