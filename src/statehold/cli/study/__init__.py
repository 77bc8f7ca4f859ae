"""The factors of checkpoint I/O on a storage, measured on it, and the resulting profile."""
