"""How attention over a packed row is computed: a rule, and four ways to apply it."""
