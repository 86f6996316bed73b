"""`outrider bench events`: event throughput of one router.

cli.py                     Event throughput of one router.
client.py                  Client process of the event benchmark.
scripted_verifier.py       Scripted verifier of the event benchmark.
"""
