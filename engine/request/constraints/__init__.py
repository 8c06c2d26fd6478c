"""What form a text must have: schemas, regular expressions, choices, grammars."""
