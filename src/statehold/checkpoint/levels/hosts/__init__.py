"""Levels of which each host has its own: which hosts there are, which steps are whole, file
transfer."""
