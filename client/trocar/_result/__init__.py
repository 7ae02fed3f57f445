"""Results: feature maps, statistics, histories."""
