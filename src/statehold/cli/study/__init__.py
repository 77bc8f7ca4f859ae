"""What decides checkpoint I/O on a storage, measured on it, and the profile that follows."""
