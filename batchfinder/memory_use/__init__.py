"""Memory of one size by kind, by module and by tensor, on one GPU and on several."""
