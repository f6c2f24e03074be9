"""Whether a request may pass: keys, budgets, length."""
