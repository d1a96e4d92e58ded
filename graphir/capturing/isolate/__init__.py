"""Replacements in the process and in the module during a recording, and their end. Imports words."""
