"""Features of towers that stand still: computed once, kept on disk, trained on as if they were pictures and words."""
