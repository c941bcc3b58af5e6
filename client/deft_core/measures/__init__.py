"""What commands count and print: intervals, speed-ups, what speculation did, and tables."""
