"""Levels: the places where steps are kept, from the nearest and fastest to the farthest and
safest."""
