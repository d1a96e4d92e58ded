"""What a step is given and what it starts from. Imports words."""
