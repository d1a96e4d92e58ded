"""What a program is: devices, sizes, blobs, operators, nets, programs, and their text and file forms."""
