"""Layer-wise budgets for any retain policy."""
