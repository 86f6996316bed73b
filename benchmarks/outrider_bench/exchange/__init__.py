"""`outrider bench exchange`: round trips between verifier and drafter, without models.

channels.py                The transports that the exchange benchmark compares.
cli.py                     Round trips of the exchange by transport.
"""
