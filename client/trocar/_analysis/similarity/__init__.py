"""Similarity of feature maps: CKA, and dissimilarities of samples that are compared."""
