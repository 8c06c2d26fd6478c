"""All layers together: steps as transactions, row selection, shared prefixes."""
