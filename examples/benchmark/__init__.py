"""budgetopt beside what people use instead, at the same measured peaks: ``python -m examples.benchmark``."""
