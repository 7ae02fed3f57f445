"""Commands that describe models and run passes: modules, feature maps, classes, gradients."""
