"""Generated from proto/outrider/wire/v1 by `make proto`; only `outrider.wire` imports it."""
