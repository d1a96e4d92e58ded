"""What stands on passes and runtime: whole ways in one call, and the command line."""
