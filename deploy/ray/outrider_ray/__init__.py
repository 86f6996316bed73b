"""Outrider on Ray: verifier and drafter are actors, the router is the launcher's own process.

__main__.py                Command line of the launcher: `python -m outrider_ray`, or `outrider
                           ray`.
actor_keeper.py            Actor keeper: replaces an actor of a given name whenever it dies.
actors.py                  Endpoint factories that run inside the actors, the only processes that
                           import torch.
autoscale.py               Autoscaling policy: number of verifiers and drafters of a fleet.
cluster.py                 Ray cluster lifecycle: start or join Ray, and stop it within a bounded
                           time.
commands.py                Commands `status`, `stop` and `node`: control of a detached fleet and of
                           a Ray node.
config.py                  Launcher configuration; each field is a key of its TOML file.
embedded_router.py         Router inside the launcher's process: serves clients over gRPC and
                           HTTP, and talks to the fleet over Ray.
fixed_keys.py              Configuration keys that the launcher sets itself or that have no meaning
                           under Ray.
fleet.py                   Actors of one fleet: placement, restart, adding and removing.
fleet_lifecycle.py         Lifecycle of a fleet of Ray actors: starts it, serves until a signal,
                           drains and stops it.
members.py                 Fleet members: actors by role and number, and the groups of actors that
                           are placed together.
node_keeper.py             Node keeper: rejoins a Ray node to its cluster after it was declared
                           dead.
placement.py               Actor placement: placement groups with a bundle for each actor, and GPU
                           shares.
scaler.py                  Scaler: carries out the decisions of `autoscale.plan_scaling` and informs
                           the router.
serve_app.py               Outrider as a Ray Serve application: `serve run
                           outrider_ray.serve_app:app model=NAME`.
supervisor.py              Supervisor of a detached fleet: an actor that outlives the process that
                           started it.
"""
