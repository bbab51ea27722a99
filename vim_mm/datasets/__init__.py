"""Makes data sets, of shapes and of Fashion-MNIST's garments; mm's own classes read them."""
