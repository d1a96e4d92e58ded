"""Which recordings are taken, and the sizes and guards that follow from them. Imports words, record and step."""
