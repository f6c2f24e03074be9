"""What the gateway and the supervisor talk about: plain data, standard library only."""
