"""What was trained on, and how it went: pages that stand alone."""
