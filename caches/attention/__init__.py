"""Keys and values in the forms that attention multiplies with."""
