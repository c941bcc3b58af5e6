"""A page that shows the server at work. Costs nothing while nobody looks."""
