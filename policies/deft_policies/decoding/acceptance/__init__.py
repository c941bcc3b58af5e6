"""Rules that decide which drafted tokens may stand for the target's own."""
