"""What a recording replaces in the process and puts back. Imports words; a caller says where the step is."""
