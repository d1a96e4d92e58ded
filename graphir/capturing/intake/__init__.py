"""A step's arguments, options and optimizer, and the state that the step starts from. Imports words."""
