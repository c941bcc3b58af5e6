"""Rules that decide which drafted tokens are accepted instead of the target's own."""
