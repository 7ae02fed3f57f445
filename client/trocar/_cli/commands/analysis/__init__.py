"""Commands that analyse: attribution, gradient flow, distances, comparisons."""
