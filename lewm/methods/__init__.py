"""Methods: each is one file that says what it learns from, how it is trained, and how it plans or acts."""
