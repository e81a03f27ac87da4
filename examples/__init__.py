"""Scripts that show budgetopt at work; each is run by a test."""
