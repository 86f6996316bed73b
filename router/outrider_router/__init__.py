"""The router process: the API front end, which places sessions, plans speculation and hides
failures. Arrows of imports: base <- admission, fleet <- requests <- api; `config` is open to
all.

__main__.py                Command line of the router process: parses flags, starts the servers and
                           drains on a signal.
config.py                  Configuration of the router process: `RouterConfig` and its tables.
"""
