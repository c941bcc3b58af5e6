"""Other projects' wire protocols, spoken well enough that their own clients notice no change."""
