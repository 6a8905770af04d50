"""Full attention: every token, no selection."""
