"""How often to save, from measured costs and rates of failure. Pure arithmetic."""
