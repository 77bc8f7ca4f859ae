"""Object stores: addresses, clients, and their errors by name."""
