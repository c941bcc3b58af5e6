"""What robots, servers and evaluations share: types, the wire, files, conventions. No torch."""
