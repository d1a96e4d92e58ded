"""Words of refusals. Imports no other room."""
