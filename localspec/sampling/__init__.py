"""From logits to emitted tokens: processed laws, coupled draws, acceptance, budgets. Knows no models."""
