"""fms-acceleration's plain rows on one A100."""
