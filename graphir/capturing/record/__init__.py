"""From operators that the dispatcher sees to calls on values. Imports words, intake and isolate."""
