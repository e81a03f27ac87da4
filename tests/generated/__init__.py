"""Models made by chance from a small grammar, each trained beside its plain copy."""
