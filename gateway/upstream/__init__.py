"""How bytes travel to a replica and back."""
