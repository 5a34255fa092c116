"""Local inference for one GPU: drafts ahead, proves every token, shows what it gains."""
