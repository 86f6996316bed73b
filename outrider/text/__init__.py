"""Text on the router's side: tokenizing, chat templates, incremental detokenizing, stop strings."""
