"""Levels: the places a step is kept at, from the nearest and fastest to the farthest and safest."""
