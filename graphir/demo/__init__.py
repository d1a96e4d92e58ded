"""`graphir demo`: the whole way on a small residual net and real images."""
