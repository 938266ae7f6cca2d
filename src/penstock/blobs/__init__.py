"""Images of rows: their bytes, stored once for each owner, and which rows use them."""
