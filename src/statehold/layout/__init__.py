"""Who holds what, who writes it, and where every byte goes. Pure arithmetic: no disk, no torch."""
