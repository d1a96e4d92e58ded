"""The program that is built of a fitted recording. Imports all rooms before it."""
