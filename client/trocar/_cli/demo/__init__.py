"""`trocar demo`: a tour with a real pretrained model, from checkpoint to feature maps."""
