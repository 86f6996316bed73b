"""The router process: the API front end, which assigns sessions to verifiers and drafters and
continues requests when a verifier or drafter fails. `admission` and `fleet` may import `base`,
`requests` may import all three, and `api` may import all four. All of them may import `config`.

__main__.py                Command line of the router process: parses flags, starts the servers and
                           drains on a signal.
config.py                  Configuration of the router process: `RouterConfig` and its tables.
"""
