"""One run of a step, from its forward to its gradients. Imports words, intake, isolate and record."""
