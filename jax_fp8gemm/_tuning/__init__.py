"""Which kernel a product gets: tile configs and the cost model that chooses among them."""
