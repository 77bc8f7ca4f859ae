"""Levels that each host has for itself: which hosts there are, which steps are whole, file
transfer."""
