"""Which drafts stand: `matching` where tokens are compared, `coins` where laws are."""
