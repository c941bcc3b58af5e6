"""LIBERO as an evaluation of policies: the simulator, episodes, results and their report."""
