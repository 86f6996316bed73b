"""`outrider bench events`: event throughput of one router.

cli.py                     `outrider bench events`: events per second and processor cost of one
                           router process.
client.py                  Client process of `outrider bench events`: streams answers one after
                           another.
scripted_verifier.py       Verifier without a model for `outrider bench events`: every round emits
                           tokens for every session.
"""
