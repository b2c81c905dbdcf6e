"""Our own types between HTTP and models. Knows neither JSON nor tensors."""
