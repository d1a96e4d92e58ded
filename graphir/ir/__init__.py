"""What a program is: devices, sizes, blobs, operators, nets, programs, plans, and their text and file forms."""
