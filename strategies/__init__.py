"""Policies that annotate a program; they never change its graph."""
